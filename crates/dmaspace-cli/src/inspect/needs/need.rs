//! Needs of a guest, by its description alone.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::inspect::{DeviceDriver, Guest, Interface, Monitor};

const GIB: u64 = 1 << 30;
/// The first address above the devices of a PC.
const HIGH: u64 = 4 * GIB;
/// Addresses that AMD's hosts reserve, and QEMU's guests with their processors leave out. Source: AMD 48882 3.08, section
/// 2.1.2; QEMU hw/i386/pc.c, `AMD_HT_START`, `AMD_ABOVE_1TB_START`.
pub(super) const HYPERTRANSPORT: u64 = 0xfd_0000_0000;
const ABOVE: u64 = 1 << 40;
/// The version of machines that leave them out: QEMU hw/i386/pc_q35.c, `enforce_amd_1tb_hole`.
const LEAVES_OUT: (u32, u32) = (7, 1);
/// Machines from this one on have memory below 4 GiB in whole GiB: QEMU hw/i386/pc.c, `gigabyte_align`.
const ALIGNED: (u32, u32) = (2, 0);
/// RAM of QEMU's `virt` of Arm: hw/arm/virt.c, `base_memmap`, VIRT_MEM.
const VIRT: u64 = GIB;

/// Pages of one pool that a guest needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolNeed {
    pub(crate) page_bytes: u64,
    pub(crate) pages: u64,
    /// Nodes that the pages must be from; empty where any will do.
    pub(crate) nodes: Vec<u32>,
}

/// Pages of pools, objects of one size and the same nodes together.
pub(crate) fn pools(guest: &Guest) -> Vec<PoolNeed> {
    let mut needs: BTreeMap<(u64, Vec<u32>), u64> = BTreeMap::new();
    for ram in &guest.memory {
        let Some(page) = ram.pool_bytes.filter(|page| *page > 0) else {
            continue;
        };
        let mut nodes = match ram.bound {
            true => ram.host_nodes.clone(),
            false => Vec::new(),
        };
        nodes.sort_unstable();
        nodes.dedup();
        let pages = needs.entry((page, nodes)).or_default();
        *pages = pages.saturating_add(ram.bytes.div_ceil(page));
    }
    let needs = needs.into_iter().filter(|(_, pages)| *pages > 0);
    needs
        .map(|((page_bytes, nodes), pages)| PoolNeed {
            page_bytes,
            pages,
            nodes,
        })
        .collect()
}

/// The counter of locked memory that is compared with `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LockCounter {
    /// The counter of the process.
    #[serde(rename = "mm->locked_vm")]
    Process,
    /// The counter of all processes of the user.
    #[serde(rename = "user->locked_vm")]
    User,
}

impl LockCounter {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Process => "mm->locked_vm",
            Self::User => "user->locked_vm",
        }
    }
}

/// Memory that VFIO counts as locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockNeed {
    pub(crate) interface: Interface,
    pub(crate) counter: LockCounter,
    /// The guest's memory.
    pub(crate) memory_bytes: u64,
    /// Address spaces that count it.
    pub(crate) times: u64,
    /// All of it is mapped at the start, and not what the guest shares or a mediated device pins meanwhile.
    pub(crate) at_start: bool,
    /// Memory that the monitor locks by itself (`mlockall`), which counts besides.
    pub(crate) mlocked_bytes: u64,
}

impl LockNeed {
    /// Memory that VFIO counts for this guest; `None` where nothing is given to it.
    ///
    /// Type 1 counts each page that a container maps for the process, and a page of a pool as so many small ones. Devices
    /// share a container, but for disks of QEMU's NVMe driver, which has one for each, and for devices behind a virtual
    /// IOMMU. iommufd counts by user, unless the process that opened it asked for the other, as libvirt does. Pages that
    /// belong to no memory, as BARs do, are not counted. QEMU copies no mapping from one address space to another.
    ///
    /// Source: Linux drivers/vfio/vfio_iommu_type1.c, `vfio_pin_pages_remote`; drivers/iommu/iommufd/pages.c,
    /// `do_update_pinned`, and main.c, `iommufd_fops_open`; QEMU util/vfio-helpers.c, `qemu_vfio_init_pci`; libvirt
    /// src/qemu/qemu_domain.c, `qemuDomainGetMemLockLimitBytes`, and src/util/viriommufd.c, `virIOMMUFDSetRLimitMode`.
    pub(crate) fn of(guest: &Guest) -> Option<Self> {
        let interface = guest.interface?;
        let disks = guest
            .devices
            .iter()
            .filter(|device| device.driver == DeviceDriver::Nvme)
            .count() as u64;
        let named = guest.devices.len() as u64 - disks;
        let on_demand = !guest.mediated.is_empty();
        // A device without an address is one, too.
        let others = match named {
            0 if disks == 0 && !on_demand => 1,
            named => named,
        };
        let spaces = match guest.viommu {
            Some(_) => others,
            None => others.min(1),
        };
        let times = disks.saturating_add(spaces);
        let counter = match interface {
            Interface::Iommufd if guest.monitor != Monitor::Libvirt => LockCounter::User,
            _ => LockCounter::Process,
        };
        let small = guest.memory.iter().filter(|ram| ram.pool_bytes.is_none());
        let small = small.fold(0u64, |sum, ram| sum.saturating_add(ram.bytes));
        Some(Self {
            interface,
            counter,
            memory_bytes: guest.bytes(),
            times: times.max(1),
            at_start: times > 0 && !guest.keeps_private_memory(),
            // mm/mlock.c, `mlock_fixup`: pages of a pool are not counted.
            mlocked_bytes: if guest.locked { small } else { 0 },
        })
    }

    /// Bytes that VFIO counts together.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory_bytes.saturating_mul(self.times)
    }

    /// The same with what else counts for the process.
    pub(crate) fn counted_bytes(&self) -> u64 {
        match self.counter {
            LockCounter::Process => self.bytes().saturating_add(self.mlocked_bytes),
            LockCounter::User => self.bytes(),
        }
    }

    /// Bytes where each address is counted once.
    pub(crate) fn once_bytes(&self) -> u64 {
        let once = Self { times: 1, ..*self };
        once.counted_bytes()
    }

    /// The limit that libvirt sets where no other is given.
    pub(crate) fn by_libvirt(&self) -> u64 {
        self.bytes().saturating_add(GIB)
    }
}

/// Memory that is mapped in pieces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pieces {
    /// The owner of the memory.
    pub what: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of a piece.
    pub piece_bytes: u64,
    /// Pieces at most.
    pub count: u64,
}

impl Pieces {
    fn new(what: &'static str, bytes: u64, piece_bytes: u64) -> Self {
        Self {
            what,
            bytes,
            piece_bytes,
            count: bytes.div_ceil(piece_bytes.max(1)),
        }
    }
}

/// Memory that the monitor maps in pieces: shared pages of a confidential guest as they are converted, and blocks of
/// virtio-mem as they are plugged.
///
/// Source: QEMU hw/vfio/listener.c, `vfio_ram_discard_notify_populate`; system/ram-block-attributes.c,
/// `ram_block_attributes_get_block_size` (pages of the host); hw/virtio/virtio-mem.c, `virtio_mem_default_block_size`.
pub(crate) fn pieces(guest: &Guest) -> Vec<Pieces> {
    const SMALL: u64 = 4096;
    const BLOCK: u64 = 2 << 20;
    let mut pieces = Vec::new();
    if guest.keeps_private_memory() {
        pieces.push(Pieces::new(
            "shared pages of the confidential guest",
            guest.bytes(),
            SMALL,
        ));
    }
    for blocks in &guest.blocks {
        let bytes = blocks.bytes.max(blocks.requested_bytes);
        if bytes > 0 {
            let block = blocks.block_bytes.unwrap_or(BLOCK);
            pieces.push(Pieces::new("virtio-mem", bytes, block));
        }
    }
    pieces
}

/// A range of guest addresses that is RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GuestRange {
    /// Its first address.
    #[serde(with = "crate::json::hex")]
    pub first: u64,
    /// Its last one.
    #[serde(with = "crate::json::hex")]
    pub last: u64,
}

/// Where QEMU places RAM, which is mapped at the guest's addresses; empty where that is not known. `amd` is a host of AMD,
/// whose processor the guest is taken to have; `arm` one of Arm. Memory devices are taken to follow at once.
///
/// Source: QEMU hw/i386/pc_q35.c, `pc_q35_init`; pc_piix.c, `pc_init1`; pc.c, `pc_memory_init`, `pc_max_used_gpa`;
/// hw/arm/virt.c.
pub(crate) fn ranges(guest: &Guest, amd: bool, arm: bool) -> Vec<GuestRange> {
    let bytes = guest.bytes();
    let range = |first: u64, bytes: u64| {
        let last = first.checked_add(bytes.checked_sub(1)?)?;
        Some(GuestRange { first, last })
    };
    let (Monitor::Qemu | Monitor::Libvirt) = guest.monitor else {
        return Vec::new();
    };
    if guest.virt && arm {
        return range(VIRT, bytes).into_iter().collect();
    }
    let version = guest.machine_version;
    let Some(low) = guest.remapped.map(|low| low.bytes.min(bytes)) else {
        return Vec::new();
    };
    if version.is_some_and(|version| version < ALIGNED) {
        return Vec::new();
    }
    let high = bytes - low;
    let leaves_out = version.is_none_or(|version| version >= LEAVES_OUT);
    // The window of 64-bit BARs is behind it: 32 GiB of q35, 2 GiB of pc, which has 3 GiB below.
    let window = if low == 3 * GIB { 2 * GIB } else { 32 * GIB };
    let end = HIGH.saturating_add(high).div_ceil(GIB).saturating_mul(GIB);
    let crosses = end.saturating_add(window) > HYPERTRANSPORT;
    let start = match amd && leaves_out && crosses {
        true => ABOVE,
        false => HIGH,
    };
    [range(0, low), range(start, high)]
        .into_iter()
        .flatten()
        .collect()
}

/// Mappings of RAM at the least: one for each object and range of addresses.
pub(crate) fn mappings(guest: &Guest) -> u64 {
    let parts = guest.memory.iter().filter(|ram| ram.bytes > 0);
    let mut at = 0u64;
    let low = guest.remapped.map(|low| low.bytes);
    let cut = |ram: &crate::inspect::Ram| {
        let begins = at;
        at = at.saturating_add(ram.bytes);
        u64::from(low.is_some_and(|low| begins < low && low < at))
    };
    let parts: Vec<_> = parts.collect();
    let count = parts.len() as u64;
    count + parts.into_iter().map(cut).sum::<u64>()
}
