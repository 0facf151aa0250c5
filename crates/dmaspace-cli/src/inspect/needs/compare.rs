//! Rules: needs that the host does not meet.

use std::ops::RangeInclusive;

use dmaspace::layout::{ReservedRange, check};

use super::host::{Available, LockLimit, LockOwner};
use super::need::{self, LockCounter, LockNeed, PoolNeed};
use super::{NeedFinding, Remedy};
use crate::inspect::{DeviceDriver, Guest, Interface, Monitor};
use crate::size::{bytes, count};

/// BARs whose pages take time: 4 KiB pages of 4 GiB are a million.
pub(crate) const LARGE_BAR: u64 = 4 << 30;
/// The first Linux that maps BARs in huge pages by type 1.
const HUGE_BARS: (u32, u32) = (6, 15);
/// The first Linux that maps BARs by iommufd, and the first QEMU that asks for it.
const PEER_LINUX: (u32, u32) = (6, 19);
const PEER_QEMU: (u32, u32) = (11, 0);

impl NeedFinding {
    fn new(cause: &'static str, title: String, text: String, source: &'static str) -> Self {
        Self {
            cause,
            likely: false,
            title,
            text,
            devices: Vec::new(),
            addresses: Vec::new(),
            advice: Vec::new(),
            source,
            reserved: None,
        }
    }

    fn advise(mut self, advice: impl IntoIterator<Item = Remedy>) -> Self {
        self.advice.extend(advice);
        self
    }

    fn of_guest(mut self, guest: &Guest) -> Self {
        let devices = guest.devices.iter().map(|device| device.address.clone());
        self.devices.extend(devices);
        self
    }
}

/// Bytes for people, and exactly.
fn exactly(number: u64) -> String {
    match bytes(number) {
        text if text.contains(&number.to_string()) => text,
        text => format!("{text} ({number} bytes)"),
    }
}

/// Needs of pages of one size, beside the pool's free ones.
struct PoolOfSize<'a> {
    needs: Vec<&'a PoolNeed>,
    available: &'a Available,
    page: u64,
    /// Free pages of all nodes, and pages by which the pool may grow.
    free: u64,
    growth: u64,
}

/// Pools with fewer free pages than are needed, together or on the nodes that memory is bound to.
pub(crate) fn pools(needs: &[PoolNeed], available: &Available) -> Vec<NeedFinding> {
    let mut found = Vec::new();
    let mut sizes: Vec<u64> = needs.iter().map(|need| need.page_bytes).collect();
    sizes.dedup();
    for page in sizes {
        let Some(free) = available.free(page, &[]) else {
            continue;
        };
        let here = needs.iter().filter(|need| need.page_bytes == page);
        let pool = PoolOfSize {
            needs: here.collect(),
            available,
            page,
            free,
            growth: available.growth(page),
        };
        match pool.short() {
            Some(short) => found.push(short),
            None => pool.short_on_nodes(&mut found),
        }
    }
    found
}

impl PoolOfSize<'_> {
    const SOURCE: &'static str = "Linux Documentation/admin-guide/mm/hugetlbpage.rst; QEMU qapi/qom.json, MemoryBackendProperties (policy)";

    /// The file that sets the number of pages, of all nodes or of one.
    fn file(&self, node: Option<u32>) -> String {
        let kib = self.page >> 10;
        match node {
            None => format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"),
            Some(node) => format!(
                "/sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages"
            ),
        }
    }

    /// All nodes together have too few.
    fn short(&self) -> Option<NeedFinding> {
        let needs = self.needs.iter();
        let pages = needs.fold(0u64, |sum, need| sum.saturating_add(need.pages));
        let (free, growth) = (self.free, self.growth);
        if pages <= free.saturating_add(growth) {
            return None;
        }
        let (size, missing) = (bytes(self.page), pages - free);
        // Where all of it is bound to one node, the pages must come there.
        let mut sets = self.needs.iter().map(|need| need.nodes.as_slice());
        let node = match sets.next() {
            Some(&[node]) if sets.all(|set| set == [node]) => Some(node),
            _ => None,
        };
        let there = node.and_then(|node| self.available.free(self.page, &[node]));
        let raise = Remedy::Raise {
            file: self.file(node),
            pages: pages.saturating_sub(there.unwrap_or(free)).max(missing),
        };
        let grows = match growth {
            0 => String::new(),
            growth => format!(", the pool may grow by {growth}"),
        };
        let finding = NeedFinding::new(
            "pages.short",
            format!("the pool of {size} is {} pages short", count(missing)),
            format!(
                "The guest needs {pages} pages of {size}, and {free} are free{grows}: {missing} are missing."
            ),
            Self::SOURCE,
        );
        Some(finding.advise([
            raise,
            Remedy::line(
                "Large pages are easiest to find early after the boot: hugepagesz= and hugepages= on the kernel's \
                 command line.",
            ),
        ]))
    }

    /// Nodes to which memory is bound have too few.
    fn short_on_nodes(&self, found: &mut Vec<NeedFinding>) {
        let (page, free) = (self.page, self.free);
        let size = bytes(page);
        let sum = |nodes: &[u32]| {
            let within = self.needs.iter().filter(|need| {
                let nodes = |node| nodes.contains(node);
                !need.nodes.is_empty() && need.nodes.iter().all(nodes)
            });
            within.fold(0u64, |sum, need| sum.saturating_add(need.pages))
        };
        let mut sets: Vec<Vec<u32>> = self.needs.iter().map(|need| need.nodes.clone()).collect();
        sets.retain(|nodes| !nodes.is_empty());
        let mut all: Vec<u32> = sets.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        if !all.is_empty() && !sets.contains(&all) {
            sets.push(all);
        }
        let before = found.len();
        for nodes in sets {
            // A set that is short makes its union short.
            let told = found.len() > before && self.needs.iter().all(|need| need.nodes != nodes);
            let (pages, there) = (sum(&nodes), self.available.free(page, &nodes));
            let short = |there: &u64| *there < pages && self.growth == 0 && !told;
            let Some(there) = there.filter(short) else {
                continue;
            };
            let list: Vec<String> = nodes.iter().map(u32::to_string).collect();
            let (missing, node) = (pages - there, list.join(", "));
            let raise = match nodes.as_slice() {
                [node] => Remedy::Raise {
                    file: self.file(Some(*node)),
                    pages: missing,
                },
                _ => Remedy::line(format!(
                    "Raise nr_hugepages of nodes {node} by {missing} together \
                     (/sys/devices/system/node/nodeN/hugepages/hugepages-{}kB).",
                    page >> 10
                )),
            };
            let finding = NeedFinding::new(
                "pages.short-on-node",
                format!(
                    "the pool of {size} on node {node} is {} pages short",
                    count(missing)
                ),
                format!(
                    "The guest needs {pages} pages of {size} from node {node}, to which its memory is bound, and \
                     {there} are free there; all nodes together have {free}, which would do."
                ),
                Self::SOURCE,
            );
            found.push(finding.advise([
                raise,
                Remedy::line(
                    "Or spread the memory: a cell or memory object for each node, bound to it.",
                ),
            ]));
        }
    }
}

/// Control groups that leave less memory than the guest has.
pub(super) fn cgroups(guest: &Guest, available: &Available) -> Vec<NeedFinding> {
    let mut found = Vec::new();
    for (page, group) in &available.cgroups {
        let parts = guest.memory.iter().filter(|ram| ram.pool_bytes == *page);
        let need = parts.fold(0u64, |sum, ram| sum.saturating_add(ram.bytes));
        if need <= group.left() {
            continue;
        }
        let what = page.map_or("memory".into(), |page| {
            format!("huge pages of {}", bytes(page))
        });
        let setting = match page {
            None => {
                "systemd: MemoryMax= of the unit and its slice; a container: --memory; Kubernetes: resources.limits.memory."
            }
            Some(_) => {
                "hugetlb.SIZE.max of the group; Kubernetes: resources.limits.hugepages-SIZE."
            }
        };
        let mut finding = NeedFinding::new(
            "pages.over-group",
            format!("the control group leaves {} of {what}", bytes(group.left())),
            format!(
                "The guest has {} of {what}, and {group}. Beyond it the monitor is killed, or gets no page.",
                exactly(need)
            ),
            "Linux Documentation/admin-guide/cgroup-v2.rst, \"Memory Interface Files\", \"HugeTLB Interface Files\"",
        );
        // Without a device or prealloc, memory comes as the guest uses it.
        let used = guest.interface.is_some() && !guest.keeps_private_memory();
        finding.likely = !used && page.is_none();
        found.push(finding.advise([Remedy::line(setting)]));
    }
    found
}

/// How the limit of locked memory is raised to `need` bytes.
pub(crate) fn raise(of: LockOwner, monitor: Monitor, need: u64) -> Vec<Remedy> {
    let kib = need.div_ceil(1024);
    let mut lines = match of {
        LockOwner::Shell => vec![format!("ulimit -l {kib}")],
        LockOwner::Process(pid) => vec![format!("prlimit --memlock={need}:{need} --pid {pid}")],
        LockOwner::HardLimit => vec![format!(
            "<memtune><hard_limit unit='KiB'>{kib}</hard_limit></memtune>, or no <hard_limit>: libvirt sets the limit by itself."
        )],
        LockOwner::Libvirt | LockOwner::Given => vec![format!(
            "The limit of the monitor must be {need} bytes or more (prlimit --memlock, ulimit -l)."
        )],
    };
    lines.push(match monitor {
        Monitor::Libvirt => {
            "libvirt raises the limit of its domains if virtqemud may (CAP_SYS_RESOURCE); else LimitMEMLOCK=infinity \
             in virtqemud's unit."
        }
        _ => "systemd: LimitMEMLOCK=infinity in the unit that starts the monitor.",
    }
    .into());
    lines.extend([
        "A container: --ulimit memlock=-1. Kubernetes has no field for it: LimitMEMLOCK=infinity in the unit of \
         containerd or CRI-O, or the capability IPC_LOCK for the container."
            .into(),
        "CAP_IPC_LOCK lifts the limit.".into(),
    ]);
    lines.into_iter().map(Remedy::Line).collect()
}

/// Source of what counts as locked.
const LOCKED: &str = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_pin_pages_remote, vfio_lock_acct; drivers/iommu/iommufd/pages.c, do_update_pinned; libvirt src/qemu/qemu_domain.c, qemuDomainGetMemLockLimitBytes";

/// A limit on locked memory that is less than what counts.
pub(crate) fn locked(need: &LockNeed, guest: &Guest, available: &Available) -> Option<NeedFinding> {
    let limit: &LockLimit = available.lock.as_ref()?;
    let allowed = limit.in_force(need)?;
    let all = need.counted_bytes();
    // A mediated device alone pins what the guest's driver uses.
    let on_demand = !need.at_start && !guest.keeps_private_memory();
    if allowed >= all || on_demand {
        return None;
    }
    let of = match limit.of {
        LockOwner::Shell => "of this shell, which a monitor started from it has".into(),
        LockOwner::Process(pid) => format!("of process {pid}"),
        LockOwner::HardLimit => "by the domain's <hard_limit>".into(),
        LockOwner::Libvirt | LockOwner::Given => "of the monitor".to_owned(),
    };
    let counts = match (need.interface, need.counter) {
        (Interface::Type1, _) => "type 1 counts all guest memory once per container",
        (_, LockCounter::User) => "iommufd counts all guest memory for the user",
        (_, LockCounter::Process) => {
            "iommufd, as libvirt opens it, counts all guest memory for the process"
        }
    };
    let times = match (need.times, &guest.viommu) {
        (1, _) => String::new(),
        (times, Some(model)) => {
            format!(", and with a virtual IOMMU ({model}) once for each of {times} devices")
        }
        (times, None) => format!(", of which there are {times}"),
    };
    let besides = match (need.counter, need.mlocked_bytes) {
        (LockCounter::Process, 1..) => {
            format!(
                "; memory that the monitor locks itself ({}) counts besides",
                bytes(need.mlocked_bytes)
            )
        }
        (LockCounter::User, _) => "; other processes of the user count on the same counter".into(),
        _ => String::new(),
    };
    let at_most = if need.at_start { "" } else { "up to " };
    let text = format!(
        "RLIMIT_MEMLOCK {of} is {}, and {counts}{times} ({}){besides}: {at_most}{} are needed, {} more. BARs are not counted.",
        exactly(allowed),
        need.counter.name(),
        exactly(all),
        exactly(all - allowed)
    );
    let each = guest.viommu.is_some() && allowed >= need.once_bytes();
    let title = format!(
        "the limit on locked memory is {} short (RLIMIT_MEMLOCK)",
        bytes(all - allowed)
    );
    let cause = if each {
        "memlock.per-device"
    } else {
        "memlock.too-low"
    };
    let mut finding = NeedFinding::new(cause, title, text, LOCKED);
    // A guest's own first stage leaves one address space for all devices of iommufd.
    finding.likely = !need.at_start || each && need.interface == Interface::Iommufd;
    if each {
        finding = finding.of_guest(guest);
    }
    let mut advice = raise(limit.of, guest.monitor, all);
    if each && need.interface == Interface::Type1 {
        advice.push(Remedy::line(
            "Without a virtual IOMMU all devices of one guest share a container, and the memory counts once.",
        ));
    }
    Some(finding.advise(advice))
}

/// Memory of a process on several nodes.
pub(super) fn spread(nodes: &[(Option<u32>, u64)]) -> Option<NeedFinding> {
    let used = nodes
        .iter()
        .filter(|(node, bytes)| node.is_some() && *bytes > 0);
    let used = used.count();
    let finding = (used > 1).then(|| {
        NeedFinding::new(
            "config.memory-spread",
            format!("its memory is on {used} nodes: a device is near to one of them only"),
            format!("The memory is on {used} nodes of the host, and a device is near to one of them only."),
            "Linux Documentation/admin-guide/mm/numa_memory_policy.rst",
        )
    })?;
    Some(finding.advise([Remedy::line(
        "numactl --membind, or host-nodes= and policy=bind of QEMU's memory backend",
    )]))
}

/// Mappings of type 1 that may run out.
pub(crate) fn mappings(guest: &Guest, available: &Available) -> Option<NeedFinding> {
    // Disks of QEMU's driver and mediated devices have no such memory.
    let devices = match guest.devices.is_empty() {
        true => guest.mediated.is_empty(),
        false => guest
            .devices
            .iter()
            .any(|device| device.driver == DeviceDriver::Vfio),
    };
    if guest.interface != Some(Interface::Type1) || !devices {
        return None;
    }
    let (limit, pieces) = (available.mapping_limit(), need::pieces(guest));
    let most = pieces
        .iter()
        .fold(0u64, |sum, one| sum.saturating_add(one.count));
    if most.saturating_add(need::mappings(guest)) <= limit {
        return None;
    }
    let parts = pieces.iter().map(|one| {
        let reach = bytes(limit.saturating_mul(one.piece_bytes));
        format!(
            "{} ({}) in pieces of {}: up to {}, and the limit is reached with {reach}",
            one.what,
            bytes(one.bytes),
            bytes(one.piece_bytes),
            count(one.count)
        )
    });
    let parts: Vec<_> = parts.collect();
    let text = format!(
        "A container of type 1 has {limit} mappings at most (dma_entry_limit), and the monitor maps {}. How many there will \
         be depends on the guest.",
        parts.join("; ")
    );
    let title = format!(
        "type 1 may run out of mappings: {} of {}",
        count(most),
        count(limit)
    );
    let source = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_dma_do_map, dma_entry_limit; QEMU hw/vfio/listener.c, vfio_ram_discard_notify_populate";
    let mut finding =
        NeedFinding::new("memlock.mapping-limit", title, text, source).of_guest(guest);
    finding.likely = true;
    let enough = most.saturating_add(1024);
    let mut advice = vec![
        match guest.monitor {
            Monitor::Libvirt => "iommufd has no such limit: <driver name='vfio' iommufd='yes'/> in <hostdev>.".to_owned(),
            _ => "iommufd has no such limit: -object iommufd,id=iommufd0 and iommufd=iommufd0 at the device.".into(),
        },
        format!("vfio_iommu_type1.dma_entry_limit={enough} on the kernel's command line raises the limit of type 1."),
    ];
    if !guest.blocks.is_empty() {
        advice.push("Larger blocks need fewer mappings: block-size= of virtio-mem (libvirt: <block> in <target>).".into());
    }
    Some(finding.advise(advice.into_iter().map(Remedy::Line)))
}

/// RAM, as QEMU places it, against reserved ranges and the width of the units.
pub(crate) fn layout(guest: &Guest, available: &Available) -> Vec<NeedFinding> {
    const SOURCE: &str = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_iommu_iova_dma_valid; drivers/iommu/iommufd/io_pagetable.c, iopt_check_iova; QEMU hw/i386/pc.c, pc_memory_init";
    let ranges = available.ranges(guest);
    if guest.interface.is_none() || ranges.is_empty() {
        return Vec::new();
    }
    let ram: Vec<RangeInclusive<u64>> = ranges.iter().map(|one| one.first..=one.last).collect();
    // A device whose group has a range of type direct is refused before anything is mapped.
    let kept = available.reserved.iter().enumerate();
    let kept: Vec<(usize, ReservedRange)> = kept
        .filter(|(_, range)| range.name != "direct")
        .map(|(nth, range)| (nth, range.clone()))
        .collect();
    let reserved: Vec<ReservedRange> = kept.iter().map(|(_, range)| range.clone()).collect();
    let report = check(0..=available.last.unwrap_or(u64::MAX), &reserved, &ram, &[]);
    let mut found = Vec::new();
    for overlap in &report.overlaps {
        let Some((nth, range)) = kept.get(overlap.reserved) else {
            continue;
        };
        let (first, last) = (*overlap.range.start(), *overlap.range.end());
        let mut finding = NeedFinding::new(
            "layout.overlaps-reserved",
            format!(
                "RAM overlaps the reserved range at {:#x}",
                range.range.start()
            ),
            format!(
                "RAM of the guest overlaps the host's reserved range {:#x} to {:#x} ({}) at {first:#x} to {last:#x}: a map \
                 of it ends with EINVAL.",
                range.range.start(),
                range.range.end(),
                range.name
            ),
            SOURCE,
        );
        finding.addresses.push((first, last));
        finding.reserved = Some(*nth);
        found.push(finding.advise([Remedy::line(
            "A machine type of QEMU 7.1 or later with a processor of AMD has no RAM from 1,012 GiB to 1 TiB; else less \
             memory, so that it ends below the range.",
        )]));
    }
    for beyond in &report.beyond {
        let (first, last) = (*beyond.range.start(), *beyond.range.end());
        let end = available.last.unwrap_or(u64::MAX);
        let bits = 64 - end.leading_zeros();
        let mut finding = NeedFinding::new(
            "layout.address-width",
            format!("RAM ends beyond the {bits} bits that the IOMMU translates"),
            format!(
                "RAM of the guest lies beyond the translated range, {first:#x} to {last:#x}: the last address is {end:#x}."
            ),
            SOURCE,
        );
        finding.addresses.push((first, last));
        found.push(finding.advise([Remedy::line(format!(
            "Less memory, so that it ends within {bits} bits; 64-bit BARs stay within them by -cpu \
             host,host-phys-bits-limit={bits} (libvirt: <maxphysaddr mode='passthrough' limit='{bits}'/>)."
        ))]));
    }
    found
}

/// BARs whose pages take time.
pub(super) fn large(available: &Available) -> impl Iterator<Item = &(String, u64)> {
    let bars = available.bars.iter();
    bars.filter(|(_, bytes)| *bytes >= LARGE_BAR)
}

/// The pages of a BAR, and the time that was seen for them.
pub(crate) fn page_by_page(device: &str, size: u64) -> String {
    format!(
        "A BAR of {device} has {}: Linux before 6.15 maps it page by page with type 1, {} pages of 4 KiB. With Linux \
         6.14, 32 GB (8 million pages) took about 1 s on the developer's machine; each map of the BAR takes it again.",
        bytes(size),
        count(size.div_ceil(4096))
    )
}

/// BARs that take time with type 1, or that iommufd does not map.
pub(crate) fn bars(guest: &Guest, available: &Available) -> Vec<NeedFinding> {
    let mut found = Vec::new();
    let given: Vec<_> = guest
        .devices
        .iter()
        .filter(|device| device.driver == DeviceDriver::Vfio)
        .collect();
    match guest.interface {
        Some(Interface::Type1) if available.linux.is_some_and(|linux| linux < HUGE_BARS) => {
            for (device, size) in large(available) {
                let mut finding = NeedFinding::new(
                    "start.bar-mapping",
                    format!("a BAR of {} is mapped page by page", bytes(*size)),
                    page_by_page(device, *size),
                    "Linux 6.15 drivers/vfio/vfio_iommu_type1.c, vaddr_get_pfns (commit 0fd06844de5d, and the letter of its series)",
                );
                finding.devices.push(device.clone());
                found.push(
                    finding.advise([Remedy::line("Linux 6.15 or later maps BARs in huge pages.")]),
                );
            }
        }
        Some(Interface::Iommufd) if given.len() > 1 => {
            let linux = available.linux.is_some_and(|linux| linux < PEER_LINUX);
            let qemu = available.qemu.is_some_and(|qemu| qemu < PEER_QEMU);
            if linux || qemu {
                let what = if linux {
                    "Linux before 6.19"
                } else {
                    "QEMU before 11.0"
                };
                found.push(
                    NeedFinding::new(
                        "start.bar-peer",
                        "devices do not reach each other's BARs".into(),
                        format!(
                            "iommufd maps a BAR by a dma-buf only (VFIO_DEVICE_FEATURE_DMA_BUF, IOMMU_IOAS_MAP_FILE), which \
                             {what} does not have: peer-to-peer fails, and the guest runs."
                        ),
                        "Linux 6.19 drivers/vfio/pci/vfio_pci_dmabuf.c, vfio_pci_dma_buf_iommufd_map; QEMU 11.0 hw/vfio/region.c, vfio_region_create_dma_buf",
                    )
                    .of_guest(guest)
                    .advise([Remedy::line(
                        "Linux 6.19 (CONFIG_VFIO_PCI_DMABUF) and QEMU 11.0 or later; type 1 maps BARs by address.",
                    )]),
                );
            }
        }
        _ => {}
    }
    found
}
