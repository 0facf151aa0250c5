//! The guest's first process: runs the tests of its machine, says how they went, powers off.
//!
//! The kernel starts it with an empty root but for the initramfs. It mounts the file systems of the
//! kernel, learns from the kernel's command line which machine this is, and runs that machine's
//! tests one after the other. A test that panics has failed; the others still run. If this process
//! itself comes to grief the kernel panics, QEMU ends, and the host misses the last word.

#![deny(unsafe_code)]

use std::{
    any::Any,
    env, fs,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

use anyhow::Context as _;
use guest::{
    console::Line,
    machines::Machine,
    pci,
    start::{self, say},
};

mod charges;
mod containers;
mod dma;
mod domains;
mod edu;
mod examples;
mod faults;
mod handover;
mod host;
#[allow(unsafe_code)]
mod host_edu;
mod interrupts;
mod kernel_handover;
mod kernel_tables;
mod limit;
#[allow(unsafe_code)]
mod live_update;
mod many;
#[allow(unsafe_code)]
mod mock;
mod numa;
#[allow(unsafe_code)]
mod objects;
mod oversubscribed;
#[allow(unsafe_code)]
mod page_sizes;
mod peer;
mod platform;
mod program;
mod provoke;
mod release;
mod replug;
mod semantics;
mod space;
mod tests;
mod tracking;
mod virtio_iommu;

fn main() -> ExitCode {
    if std::process::id() != 1 {
        let arguments: Vec<String> = env::args().skip(1).collect();
        return match handover::second_process(&arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::from(2)
            }
        };
    }
    if let Err(error) = run() {
        println!("guest-init: {error:#}");
    }
    start::power_off()
}

fn run() -> anyhow::Result<()> {
    start::mount()?;
    let machine = host::machine()?;
    let words = fs::read_to_string("/proc/cmdline")?;
    let mut results = start::results()?;
    // A test that goes on in a second kernel has begun in the first one.
    let goes_on = live_update::goes_on(&words);
    for test in machine.tests(start::word(&words, "dmaspace.only")) {
        if !goes_on {
            say(&mut results, &Line::Run(test.into()))?;
        }
        let line = match attempt(test, machine) {
            Ok(()) => Line::Ok(test.into()),
            Err(error) => Line::Failed(test.into(), format!("{error:#}")),
        };
        say(&mut results, &line)?;
    }
    say(&mut results, &Line::Done)
}

fn attempt(name: &str, machine: &Machine) -> anyhow::Result<()> {
    let test = tests::find(name).context("there is no such test in the guest")?;
    let result = panic::catch_unwind(AssertUnwindSafe(|| test(machine)));
    result.unwrap_or_else(|panic| Err(anyhow::anyhow!("panicked: {}", message(&*panic))))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied())
        .unwrap_or("without a message")
}
