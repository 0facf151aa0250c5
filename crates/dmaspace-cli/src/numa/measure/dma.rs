//! What DMA takes through the kernel's tables on either node.
//!
//! Linux makes a page table on the node of the device that it is made for, and iommufd lets other
//! devices use it. So a device reads through tables on its own node, and through those that were made
//! for a device of another node, which is why two have to be named for that. Memory is mapped in
//! leaves of 4 KiB, and each copy is in other pages than those before: no unit has their leaves in a
//! cache.
//!
//! Where the kernel has put the tables it does not tell; the guests of this project ask its debugfs.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Backing, Mapping};
use ioas::iommufd::{BoundDevice, Iommufd, Owner, SpaceMapper};
use ioas::{Endpoint, HostMemory, Ioas, Kernel, Ledger, Memory, Placement};
use iommu::NodeId;
use iopt::Prot;
use runs::Span;
use serde::Serialize;

use super::Spread;
use crate::map::JobError;
use crate::map::clock::nanoseconds;
use crate::map::edu::{self, Edu};
use crate::map::kernel::{hint, open_failed};
use crate::map::sampled::{Copier, PLACE, held, words};
use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};
use scenario::pattern::{Pattern, differing, fill, shuffled};

/// Bytes of memory that is mapped.
const BYTES: u64 = 16 << 20;
const PAGE: u64 = 4096;
/// Pages that are copied to as many others: `edu` takes a fifth of a second for each.
const COPIES: u64 = 8;

/// What is said of the times of `edu`.
const EMULATED: &str = "QEMU emulates it, and its timer takes a tenth of a second for each transfer: \
    these times show almost nothing about tables";

/// Copies by one device through tables on one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DmaTimes {
    /// The device.
    pub device: String,
    /// Its node.
    pub device_node: Option<u32>,
    /// The node of the device that the tables were made for, where Linux puts them.
    pub table_node: Option<u32>,
    /// That device.
    pub made_for: String,
    /// Why nothing was copied.
    pub not_run: Option<String>,
    /// What must be known of the times.
    pub caution: Option<String>,
    /// Pages that were read, and as many that were written.
    pub copies: u64,
    /// Bytes of each.
    pub copy_bytes: u64,
    /// Reading from one page.
    pub read: Spread,
    /// Writing to one page.
    pub write: Spread,
    /// Bytes that are not what they should be.
    pub wrong_bytes: u64,
}

/// The devices that were named, open.
pub(super) struct Devices {
    /// First, so that devices are closed before what they are bound to.
    opened: Vec<Opened>,
    owner: Option<Arc<Owner>>,
}

struct Opened {
    shown: DeviceReport,
    bound: Arc<BoundDevice>,
}

impl Devices {
    /// Opens the devices, each once.
    pub(super) fn open(addresses: &[String]) -> Result<Self, JobError> {
        let mut devices = Self {
            opened: Vec::new(),
            owner: None,
        };
        if addresses.is_empty() {
            return Ok(devices);
        }
        let report = DevicesReport::read(&Places::default())?;
        for address in addresses {
            let shown = report.ready(address, Way::Iommufd)?;
            let known = |opened: &Opened| opened.shown.address == shown.address;
            if devices.opened.iter().any(known) {
                continue;
            }
            let failed = |source| open_failed(shown, source);
            let owner = match &devices.owner {
                Some(owner) => Arc::clone(owner),
                None => Owner::new(Iommufd::open().map_err(failed)?),
            };
            let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
            let bound = Arc::new(owner.open_device(cdev).map_err(failed)?);
            devices.owner = Some(owner);
            devices.opened.push(Opened {
                shown: shown.clone(),
                bound,
            });
        }
        Ok(devices)
    }

    /// Each device through the tables made for the first device of each node, its own node first.
    pub(super) fn measure(&self) -> Result<Vec<DmaTimes>, JobError> {
        let Some(owner) = &self.owner else {
            return Ok(Vec::new());
        };
        let mut makers: Vec<&Opened> = Vec::new();
        for opened in &self.opened {
            if makers
                .iter()
                .all(|made| made.shown.node != opened.shown.node)
            {
                makers.push(opened);
            }
        }
        let mut rows = Vec::new();
        for device in &self.opened {
            let (near, far): (Vec<_>, Vec<_>) = makers
                .iter()
                .partition(|maker| maker.shown.node == device.shown.node);
            for maker in near.into_iter().chain(far) {
                rows.push(through(owner, device, maker)?);
            }
        }
        Ok(rows)
    }
}

/// Copies of `device` through tables that are made for `maker`.
fn through(owner: &Arc<Owner>, device: &Opened, maker: &Opened) -> Result<DmaTimes, JobError> {
    let mut row = DmaTimes {
        device: device.shown.address.clone(),
        device_node: device.shown.node,
        table_node: maker.shown.node,
        made_for: maker.shown.address.clone(),
        ..DmaTimes::default()
    };
    if device.shown.id != edu::ID {
        row.not_run = Some(format!("no driver for {} here", device.shown.id));
        return Ok(row);
    }
    let mapper: SpaceMapper = SpaceMapper::new(owner)?;
    mapper.set_huge_pages(false)?;
    let space = Ioas::over_kernel(Kernel::new(mapper, None));
    space.set_placement(Placement::PerNode)?;
    // As devices of one node, they share the table that is made for the first of them.
    let node = maker.shown.node.map(NodeId);
    for opened in [maker, device] {
        if space.endpoints().contains(&(&opened.bound).into()) {
            continue;
        }
        let entered = space.attach(Endpoint::from(Arc::clone(&opened.bound)).near(node));
        entered.map_err(|source| JobError::Enter {
            address: opened.shown.address.clone(),
            hint: hint(&source),
            source,
        })?;
    }
    if space.places().len() > 1 {
        row.not_run = Some(format!(
            "its unit does not accept the tables of {}",
            row.made_for
        ));
    } else {
        copy(&space, device, &mut row)?;
    }
    space.close()?;
    Ok(row)
}

/// Has `device` copy pages of memory, and looks at what it has copied.
fn copy(space: &Ioas, device: &Opened, row: &mut DmaTimes) -> Result<(), JobError> {
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, BYTES, None).map_err(JobError::Mapping)?);
    mapping.populate(&mut |_| ControlFlow::Continue(()))?;
    let _ = fill(&mapping, &mut |_| ControlFlow::Continue(()));
    let object = HostMemory::new(Arc::clone(&mapping));
    let memory = Memory::new(Arc::new(object), &Ledger::unlimited());
    let iova = space.map_anywhere(&memory, Span::new(0, BYTES), Prot::RW, &mut ())?;
    let mut edu = Edu::new(&device.bound.device)?;
    let pages: Vec<u64> = shuffled(BYTES / PAGE, 1)
        .take(2 * COPIES as usize)
        .map(|page| page * PAGE)
        .collect();
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    let mut go_on = || ControlFlow::Continue(());
    for pair in pages.chunks_exact(2) {
        let [from, to] = pair else { continue };
        let started = Instant::now();
        edu.read(iova + from, &mut go_on)?;
        reads.push(nanoseconds(started) as f64);
        let started = Instant::now();
        edu.write(iova + to, &mut go_on)?;
        writes.push(nanoseconds(started) as f64);
        let expected = words(Pattern::Processor, *from).take((PLACE / 8) as usize);
        row.wrong_bytes += differing(held(&mapping, *to, PLACE), expected);
    }
    drop(edu);
    row.copies = reads.len() as u64;
    row.copy_bytes = PLACE;
    row.read = Spread::of(reads);
    row.write = Spread::of(writes);
    row.caution = Some(EMULATED.into());
    Ok(())
}
