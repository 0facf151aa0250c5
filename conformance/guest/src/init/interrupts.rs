//! Interrupts of `edu`, by eventfds.
//!
//! The device sends a message, or sets its wire, within the write to its register. The kernel adds to the eventfd later, so
//! a test that an interrupt does not arrive counts it with the next one that does.

use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::{Context as _, ensure};
use ioas::{
    Errno, KernelError,
    vfio::{IrqInfo, irq},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::{read, retry_on_intr},
};

use crate::{
    dma::open,
    space::{Interface, Type1},
};

/// Time after which an interrupt is lost: many times what one takes.
const PATIENCE: Timespec = Timespec {
    tv_sec: 120,
    tv_nsec: 0,
};

/// Waits for interrupts; returns how many have arrived since the last call.
fn arrivals(event: BorrowedFd<'_>) -> anyhow::Result<u64> {
    let mut wanted = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
    let ready = retry_on_intr(|| poll(&mut wanted, Some(&PATIENCE)))?;
    ensure!(ready == 1, "no interrupt in {} s", PATIENCE.tv_sec);
    let mut count = [0; 8];
    read(event, &mut count)?;
    Ok(u64::from_ne_bytes(count))
}

/// Waits for one interrupt, and no other.
fn one(event: BorrowedFd<'_>) -> anyhow::Result<()> {
    let found = arrivals(event)?;
    ensure!(found == 1, "{found} interrupts and not 1");
    Ok(())
}

/// A request for one interrupt is refused, and the error has its numbers.
fn refused(result: Result<(), KernelError>, index: u32, start: u32) -> anyhow::Result<()> {
    let right = matches!(
        result,
        Err(KernelError::Interrupts { index: i, start: s, count: 1, there: 1, errno })
            if (i, s, errno) == (index, start, Errno::EINVAL.0)
    );
    ensure!(right, "{result:?} of interrupt {start} of index {index}");
    Ok(())
}

/// A message arrives while the kind is enabled, and none does when it is disabled.
pub(crate) fn message<I: Interface>() -> anyhow::Result<()> {
    let (space, edu) = open::<I>()?;
    let device = space.device()?;
    let info = device.irq_info(irq::MSI)?;
    ensure!(info.count == 1 && info.eventfd, "{info:?}");
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    device.set_irq_triggers(irq::MSI, 0, &[Some(event.as_fd())])?;
    edu.raise(1)?;
    one(event.as_fd()).context("a message")?;
    edu.acknowledge(1)?;

    let trigger = [Some(event.as_fd())];
    refused(device.set_irq_triggers(irq::MSI, 1, &trigger), irq::MSI, 1)?;
    device.disable_irqs(irq::MSI)?;
    refused(device.disable_irqs(irq::MSI), irq::MSI, 0)?;
    edu.raise(2)?;
    let raised = edu.raised()?;
    ensure!(raised == 2, "the device has raised {raised:#x} and not 2");
    // The wire, which has no trigger, is down before messages take its place: `edu` leaves it alone then.
    edu.acknowledge(2)?;

    device.set_irq_triggers(irq::MSI, 0, &trigger)?;
    edu.raise(4)?;
    one(event.as_fd()).context("after one that was disabled")?;
    edu.acknowledge(4)?;
    Ok(device.disable_irqs(irq::MSI)?)
}

/// A wire is masked as it arrives, arrives again if the device has not been served when it is unmasked, and waits while it
/// is masked.
pub(crate) fn wire() -> anyhow::Result<()> {
    let (space, edu) = open::<Type1>()?;
    let device = space.device()?;
    let (info, right) = (
        device.irq_info(irq::INTX)?,
        IrqInfo {
            count: 1,
            eventfd: true,
            maskable: true,
            automasked: true,
            fixed: false,
        },
    );
    ensure!(info == right, "{info:?}");
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    let (event, trigger) = (event.as_fd(), [Some(event.as_fd())]);
    device.set_irq_triggers(irq::INTX, 0, &trigger)?;
    refused(device.set_irq_triggers(irq::MSI, 0, &trigger), irq::MSI, 0)?;
    edu.raise(1)?;
    one(event).context("the wire")?;
    device.unmask_irq(irq::INTX)?;
    one(event).context("unmasked while the device is not served")?;
    edu.acknowledge(1)?;
    device.unmask_irq(irq::INTX)?;

    device.mask_irq(irq::INTX)?;
    edu.raise(2)?;
    device.unmask_irq(irq::INTX)?;
    one(event).context("unmasked after it was raised")?;
    edu.acknowledge(2)?;
    device.unmask_irq(irq::INTX)?;

    edu.raise(4)?;
    one(event).context("after all of these")?;
    edu.acknowledge(4)?;
    Ok(device.disable_irqs(irq::INTX)?)
}
