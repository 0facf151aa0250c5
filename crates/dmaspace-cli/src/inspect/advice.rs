//! Which change helps most.

use std::fmt;

use hostmem::ThpMode;
use serde::Serialize;

use super::estimate::Estimate;
use super::guest::{DeviceDriver, GIANT, Guest, Host, Interface, Monitor, Ram, THP};
use crate::pool;
use crate::size::{Short, bytes};

/// A change that would help.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The finding, or the change.
    pub finding: String,
    /// Lines for QEMU's command line, libvirt's XML or a shell, to be copied.
    pub setting: Vec<String>,
    /// Settings and versions that the estimate takes for granted and the configuration does not show.
    pub assumes: Vec<String>,
    /// It needs a reboot of the host.
    pub reboot: bool,
    /// A start with it; `None` without a calibration, or where it is not about time.
    pub estimate: Option<Estimate>,
    /// How much less than today that is.
    pub saved_ns: Option<u64>,
    /// Pages that the memory would have; `None` where it is not about time.
    pub pages: Option<u64>,
}

/// A change of how memory is brought in or mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Transparent,
    Pool(u64),
    Threads(u32),
    Iommufd,
    /// iommufd gets memory of a pool by its file. With small pages that saves nothing.
    ByFile,
    /// At most so many bytes below 4 GiB.
    Low(u64),
}

/// Memory below 4 GiB that operating systems get along with.
const LOW: u64 = 1 << 30;

/// State of today, before any change.
pub(super) struct Now<'a> {
    pub(super) guest: &'a Guest,
    pub(super) host: &'a Host,
    pub(super) interface: Interface,
    pub(super) estimate: Option<Estimate>,
    /// Threads that the monitor starts and this machine has processors for; `None` without a calibration.
    pub(super) threads: Option<u32>,
}

impl Now<'_> {
    /// The same with `change`; `None` where nothing changes, or no setting is known.
    fn with(&self, change: Change) -> Option<(Guest, Host, Interface)> {
        let unfit = match change {
            // Pages of private memory are those of guest_memfd.
            Change::Transparent | Change::Pool(_) => self.guest.keeps_private_memory(),
            Change::ByFile if self.guest.keeps_private_memory() => true,
            Change::Iommufd | Change::ByFile => self
                .guest
                .devices
                .iter()
                .any(|device| device.driver == DeviceDriver::Nvme),
            _ => false,
        };
        if unfit {
            return None;
        }
        let (mut guest, mut host, mut interface) = (self.guest.clone(), *self.host, self.interface);
        let (monitor, cpus) = (guest.monitor, guest.cpus);
        for ram in &mut guest.memory {
            match change {
                // A mount of tmpfs has an option of its own.
                Change::Transparent if ram.pool_bytes.is_none() && ram.file.is_none() => {
                    ram.asks_for_huge = Some(true);
                    let mode = if ram.shared {
                        &mut host.shared
                    } else {
                        &mut host.private
                    };
                    if *mode == ThpMode::Never {
                        *mode = ThpMode::Madvise;
                    }
                }
                Change::Pool(page) if ram.bytes % page == 0 => {
                    if ram.page_bytes(&host) < page || ram.pool_bytes.is_none() {
                        (ram.pool_bytes, ram.file) = (Some(page), None);
                        ram.shared = true;
                        if monitor == Monitor::Libvirt {
                            ram.prealloc_threads = ram.prealloc_threads.max(cpus).max(1);
                        }
                    }
                }
                Change::Threads(threads) => {
                    ram.prealloc_threads = ram.prealloc_threads.max(threads);
                    ram.threads_given = true;
                }
                Change::ByFile => ram.shared = true,
                Change::Transparent | Change::Pool(_) | Change::Iommufd | Change::Low(_) => {}
            }
        }
        if change == Change::ByFile {
            if guest.memory.iter().any(|ram| ram.pool_bytes.is_none()) {
                return None;
            }
            guest.by_file = true;
        }
        if let (Change::Low(most), Some(remapped)) = (change, &mut guest.remapped) {
            remapped.bytes = remapped.bytes.min(most);
        }
        if matches!(change, Change::Iommufd | Change::ByFile) {
            interface = Interface::Iommufd;
        }
        let changed = (&guest, &host, interface) != (self.guest, self.host, self.interface);
        if matches!(change, Change::Transparent | Change::Pool(_)) {
            // They are of the pages as they are.
            guest.runs = 0;
        }
        (changed && self.guest.monitor.can(change)).then_some((guest, host, interface))
    }
}

impl Monitor {
    /// A setting for it is known.
    fn can(self, change: Change) -> bool {
        match self {
            // libvirt has no element for it.
            Self::Libvirt => !matches!(change, Change::Low(_)),
            Self::Qemu => true,
            Self::Other => change != Change::ByFile,
            Self::CloudHypervisor => matches!(change, Change::Transparent | Change::Pool(_)),
            Self::Firecracker => change == Change::Pool(THP),
        }
    }
}

/// The changes, the one that saves most time first, and a start with all that need no reboot if those are
/// several. Pages of 1 GiB, which need a reboot, come last: by no count they save more than the error of an estimate.
/// Without a calibration, fewer pages come first.
pub(super) fn changes(
    now: &Now<'_>,
    estimate: impl Fn(&Guest, &Host, Interface) -> Option<Estimate>,
) -> (Vec<Advice>, Option<Estimate>) {
    let all = [
        Some(Change::Transparent),
        Some(Change::Pool(THP)),
        Some(Change::Pool(GIANT)),
        now.threads.map(Change::Threads),
        Some(Change::Iommufd),
        Some(Change::ByFile),
        Some(Change::Low(LOW)),
    ];
    let mut found = Vec::new();
    for change in all.into_iter().flatten() {
        let Some((guest, host, interface)) = now.with(change) else {
            continue;
        };
        let after = estimate(&guest, &host, interface);
        let pages = guest.pages(&host);
        let saved = now
            .estimate
            .zip(after)
            .map(|(now, after)| now.total_ns.saturating_sub(after.total_ns));
        let helps = match saved {
            // Two starts differ by as much.
            Some(saved) => saved > now.estimate.map_or(0, |now| now.total_ns / 50),
            None => pages < now.guest.pages(now.host),
        };
        if helps {
            let advice = Advice {
                finding: change.to_string(),
                setting: change.lines(now, &guest, &host),
                assumes: change.assumes(now, &guest),
                reboot: change == Change::Pool(GIANT),
                estimate: after,
                saved_ns: saved,
                pages: Some(pages),
            };
            found.push((change, advice));
        }
    }
    found.sort_by_key(|(_, advice)| {
        let saved = advice.saved_ns.unwrap_or_default();
        (advice.reboot, std::cmp::Reverse(saved), advice.pages)
    });
    let mut together = (now.guest.clone(), *now.host, now.interface, now.estimate);
    let mut made = 0;
    for (change, _) in found.iter().filter(|(_, advice)| !advice.reboot) {
        let (guest, host, interface, before) = &together;
        let so_far = Now {
            guest,
            host,
            interface: *interface,
            ..*now
        };
        if let Some((guest, host, interface)) = so_far.with(*change) {
            let after = estimate(&guest, &host, interface);
            if after
                .zip(*before)
                .is_some_and(|(after, before)| after.total_ns < before.total_ns)
            {
                together = (guest, host, interface, after);
                made += 1;
            }
        }
    }
    let advice = found.into_iter().map(|(_, advice)| advice).collect();
    (advice, together.3.filter(|_| made > 1))
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transparent => f.write_str("transparent huge pages"),
            Self::Pool(page) => write!(f, "hugetlb pages of {}", bytes(*page)),
            Self::Threads(threads) => write!(f, "fault in by {threads} threads"),
            Self::Iommufd => f.write_str("iommufd instead of type 1"),
            Self::ByFile => f.write_str("iommufd by the memory's file"),
            Self::Low(most) => write!(f, "{} below 4 GiB", bytes(*most)),
        }
    }
}

impl Change {
    /// The lines to write; `guest` and `host` are as with the change.
    fn lines(self, now: &Now<'_>, guest: &Guest, host: &Host) -> Vec<String> {
        let mut lines = Vec::new();
        let monitor = guest.monitor;
        match self {
            Self::Transparent => {
                let path = "/sys/kernel/mm/transparent_hugepage";
                if host.private != now.host.private {
                    lines.push(format!("echo madvise > {path}/enabled"));
                }
                if host.shared != now.host.shared {
                    lines.push(format!("echo advise > {path}/shmem_enabled"));
                }
                if guest.memory != now.guest.memory {
                    lines.push(match monitor {
                        Monitor::CloudHypervisor => "--memory thp=on".into(),
                        _ => "madvise(MADV_HUGEPAGE), before memory is touched".into(),
                    });
                }
            }
            Self::Pool(page) => {
                let needed: u64 = guest.memory.iter().map(|ram| ram.bytes / page).sum();
                match page {
                    GIANT => lines.push(format!(
                        "kernel command line: hugepagesz=1G hugepages={needed}"
                    )),
                    _ => {
                        let kib = page >> 10;
                        let file =
                            format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
                        lines.extend(pool::raise(&file, needed));
                    }
                }
                let (size, unit) = if page == GIANT { (1, "G") } else { (2, "M") };
                lines.extend(match monitor {
                    Monitor::Qemu => objects(guest),
                    Monitor::Libvirt => vec![format!(
                        "in <memoryBacking>: <hugepages><page size='{size}' unit='{unit}'/></hugepages>"
                    )],
                    Monitor::CloudHypervisor => {
                        vec![format!("--memory hugepages=on,hugepage_size={size}{unit}")]
                    }
                    Monitor::Firecracker => vec!["machine-config: \"huge_pages\": \"2M\"".into()],
                    Monitor::Other => vec!["memfd_create(MFD_HUGETLB)".into()],
                });
            }
            Self::Threads(threads) => match monitor {
                Monitor::Qemu => lines = objects(guest),
                Monitor::Libvirt => lines.push(format!(
                    "in <memoryBacking>: <allocation mode='immediate' threads='{threads}'/>"
                )),
                _ => lines.push("madvise(MADV_POPULATE_WRITE) on a part in each thread".into()),
            },
            Self::Iommufd => lines = iommufd(guest),
            Self::ByFile => {
                if !now.guest.by_file {
                    lines.push("QEMU 10.1 or later".into());
                }
                if guest.memory != now.guest.memory {
                    match monitor {
                        Monitor::Libvirt => {
                            lines.push("in <memoryBacking>: <access mode='shared'/>".into());
                        }
                        _ => lines.extend(objects(guest)),
                    }
                }
                if now.interface != Interface::Iommufd {
                    lines.extend(iommufd(guest));
                }
            }
            Self::Low(most) => {
                lines.push(format!("-machine max-ram-below-4g={}", Short(most)));
            }
        }
        lines
    }
}

impl Change {
    /// Settings that the configuration does not show; `guest` is as with the change.
    fn assumes(self, now: &Now<'_>, guest: &Guest) -> Vec<String> {
        let mut found = Vec::new();
        let is_qemu = matches!(guest.monitor, Monitor::Qemu | Monitor::Libvirt);
        if now.guest.interface.is_none() && matches!(self, Self::Iommufd | Self::ByFile) {
            found.push("a device that is given, which the configuration lacks".into());
        }
        // QEMU 9.0 `qapi/qom.json`, IOMMUFDProperties ("Since: 9.0"); Linux 6.6 `drivers/vfio/device_cdev.c`.
        let known = now
            .guest
            .machine_version
            .is_some_and(|version| version >= (9, 0));
        if is_qemu
            && !known
            && self == Self::Iommufd
            && now.guest.interface != Some(Interface::Iommufd)
        {
            found.push("QEMU 9.0 and Linux 6.6, or later".into());
        }
        let pairs = now.guest.memory.iter().zip(&guest.memory);
        let any =
            |is: fn(&Ram, &Ram) -> bool| pairs.clone().any(|(before, after)| is(before, after));
        if any(|before, after| before.prealloc_threads == 0 && after.prealloc_threads > 0) {
            found.push("memory is brought in before the start (prealloc)".into());
        }
        if is_qemu && any(|before, after| !before.shared && after.shared) {
            found.push("shared memory, as a memfd is by default".into());
        }
        let mut lost: Vec<&str> = Vec::new();
        for (before, after) in pairs.clone() {
            let names = before.properties.iter().map(|(name, _)| name.as_str());
            let of_file = before.file.is_some() && after.file.is_none();
            lost.extend(names.filter(|name| of_file && OF_FILES.contains(name)));
        }
        if !lost.is_empty() {
            found.push(format!("no file, and so none of {}", lost.join(", ")));
        }
        found
    }
}

/// Properties of memory objects that are those of files alone: QEMU 10.0 `qapi/qom.json`, MemoryBackendFileProperties.
const OF_FILES: [&str; 6] = ["align", "discard-data", "offset", "pmem", "readonly", "rom"];

/// Settings that give devices by iommufd.
fn iommufd(guest: &Guest) -> Vec<String> {
    match guest.monitor {
        Monitor::Qemu => {
            let object = "-object iommufd,id=iommufd0".to_owned();
            let host = guest.devices.iter().map(|device| device.address.as_str());
            let devices = host.chain(guest.devices.is_empty().then_some("ADDRESS"));
            let device = |host| format!("-device vfio-pci,host={host},iommufd=iommufd0");
            [object].into_iter().chain(devices.map(device)).collect()
        }
        Monitor::Libvirt => vec!["in <hostdev>: <driver name='vfio' iommufd='yes'/>".into()],
        _ => vec!["/dev/iommu instead of /dev/vfio/vfio".into()],
    }
}

/// QEMU's memory objects, with all properties that they have.
fn objects(guest: &Guest) -> Vec<String> {
    let mut lines = Vec::new();
    for ram in &guest.memory {
        let id = match ram.id.as_str() {
            "" => {
                lines.push("-machine memory-backend=ram".to_owned());
                "ram"
            }
            id => id,
        };
        let kind = match (&ram.file, ram.shared || ram.pool_bytes.is_some()) {
            (Some(_), _) => "file",
            (None, true) => "memfd",
            (None, false) => "ram",
        };
        let mut line = format!(
            "-object memory-backend-{kind},id={},size={}",
            value(id),
            Short(ram.bytes)
        );
        if let Some(file) = &ram.file {
            line += &format!(
                ",mem-path={},share={}",
                value(file),
                if ram.shared { "on" } else { "off" }
            );
        } else if let Some(page) = ram.pool_bytes {
            line += &format!(",hugetlb=on,hugetlbsize={}", Short(page));
        }
        match ram.prealloc_threads {
            0 => {}
            1 => line += ",prealloc=on",
            threads => line += &format!(",prealloc=on,prealloc-threads={threads}"),
        }
        let nodes = ram
            .host_nodes
            .iter()
            .map(|node| format!(",host-nodes={node}"));
        line.extend(nodes);
        for (name, text) in &ram.properties {
            if kind == "file" || !OF_FILES.contains(&name.as_str()) {
                line += &format!(",{name}={}", value(text));
            }
        }
        lines.push(line);
    }
    lines
}

/// The value of a property, in which commas are written twice; with a shell's quotes where it needs them.
fn value(text: &str) -> String {
    let text = text.replace(',', ",,");
    shlex::try_quote(&text).map_or_else(|_| text.clone(), Into::into)
}

#[cfg(test)]
mod tests {
    use super::super::guest::Ram;
    use super::super::start::StartReport;
    use super::super::start::tests::{HOST, of, speeds};
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn advice(guest: &Guest) -> Vec<Advice> {
        StartReport::of(guest, &HOST, None, Some(&speeds())).1
    }

    fn names(advice: &[Advice]) -> Vec<&str> {
        advice
            .iter()
            .map(|advice| advice.finding.as_str())
            .collect()
    }

    fn qemu(line: &str) -> Guest {
        super::super::guest::qemu_line(line, 2 << 20).unwrap()
    }

    #[test]
    fn what_saves_most_is_first_and_a_reboot_must_be_worth_it() {
        let found = advice(&qemu("qemu -m 4G -machine microvm"));
        let expected = [
            "hugetlb pages of 2 MiB",
            "transparent huge pages",
            "fault in by 4 threads",
            "iommufd instead of type 1",
            "hugetlb pages of 1 GiB",
        ];
        // Pages of 1 GiB save most, but within the error.
        assert_eq!(names(&found), expected);
        let most = found.iter().max_by_key(|advice| advice.saved_ns);
        assert!(most.is_some_and(|advice| advice.reboot), "{found:?}");
        assert_eq!(found.iter().filter(|advice| advice.reboot).count(), 1);
        // Memory that is mapped several times may be less.
        let found = advice(&qemu("qemu -m 4G"));
        let less = found
            .iter()
            .find(|advice| advice.finding == "1 GiB below 4 GiB");
        let setting = less.map(|advice| advice.setting.join("\n"));
        assert_eq!(setting.as_deref(), Some("-machine max-ram-below-4g=1G"));
    }

    #[test]
    fn iommufd_is_advice_where_it_saves_time() {
        let advised = |ram: Ram| {
            let host = Host {
                private: ThpMode::Madvise,
                ..HOST
            };
            let guest = of(Ram {
                bytes: 4 * GIB,
                ..ram
            });
            let (_, found) = StartReport::of(&guest, &host, None, Some(&speeds()));
            names(&found).contains(&"iommufd instead of type 1")
        };
        assert!(advised(Ram::default()));
        let pool = Ram {
            pool_bytes: Some(2 * MIB),
            ..Ram::default()
        };
        assert!(!advised(pool));
        let transparent = Ram {
            asks_for_huge: Some(true),
            ..Ram::default()
        };
        assert!(!advised(transparent));
    }

    #[test]
    fn memory_of_a_pool_is_mapped_by_its_file_where_that_saves_time() {
        let finding = "iommufd by the memory's file";
        let lines = |line: &str| {
            let found = advice(&qemu(line));
            let it = found.into_iter().find(|advice| advice.finding == finding);
            it.map(|it| it.setting.join("\n"))
        };
        let pool = "-object memory-backend-memfd,id=a,size=4G,hugetlb=on,hugetlbsize=2M";
        let microvm = |more: &str| format!("qemu -machine microvm,memory-backend=a {pool} {more}");
        let device = "-device vfio-pci,host=01:00.0";
        let expected = "QEMU 10.1 or later\n-object iommufd,id=iommufd0\n\
            -device vfio-pci,host=0000:01:00.0,iommufd=iommufd0";
        assert_eq!(lines(&microvm(device)).as_deref(), Some(expected));
        let iommufd = format!("-object iommufd,id=i {device},iommufd=i");
        assert_eq!(
            lines(&microvm(&iommufd)).as_deref(),
            Some("QEMU 10.1 or later")
        );
        // It does so already, or has small pages.
        let newer = microvm(&iommufd).replace("microvm", "pc-q35-10.1");
        assert_eq!(lines(&newer), None);
        assert_eq!(lines("qemu -machine microvm -m 4G"), None);
    }

    #[test]
    fn lines_are_those_of_the_command_or_of_the_xml() {
        let lines = |guest: &Guest, finding: &str| {
            let found = advice(guest);
            let it = found.iter().find(|advice| advice.finding == finding);
            it.unwrap_or_else(|| panic!("{finding}: {found:?}"))
                .setting
                .join("\n")
        };
        let guest = qemu("qemu -m 4G -device vfio-pci,host=01:00.0");
        let giant = lines(&guest, "hugetlb pages of 1 GiB");
        let expected = "kernel command line: hugepagesz=1G hugepages=4\n\
            -machine memory-backend=ram\n\
            -object memory-backend-memfd,id=ram,size=4G,hugetlb=on,hugetlbsize=1G";
        assert_eq!(giant, expected);
        let iommufd = lines(&guest, "iommufd instead of type 1");
        let expected = "-object iommufd,id=iommufd0\n\
            -device vfio-pci,host=0000:01:00.0,iommufd=iommufd0";
        assert_eq!(iommufd, expected);
        let bound = "qemu -machine q35,memory-backend=a -object memory-backend-ram,id=a,size=4G,host-nodes=0-1,\
            policy=bind,reserve=off,x-foo=a,,b";
        let expected = "-object memory-backend-memfd,id=a,size=4G,hugetlb=on,hugetlbsize=1G,host-nodes=0,host-nodes=1,\
            policy=bind,reserve=off,x-foo='a,,b'";
        let giant = lines(&qemu(bound), "hugetlb pages of 1 GiB");
        assert!(giant.ends_with(expected), "{giant}");
        let guest = qemu(
            "qemu -machine memory-backend=a -object memory-backend-file,id=a,size=2560M,mem-path=/f",
        );
        let threads = lines(&guest, "fault in by 4 threads");
        let expected = "-object memory-backend-file,id=a,size=2560M,mem-path=/f,share=off,\
            prealloc=on,prealloc-threads=4";
        assert_eq!(threads, expected);
        // Neither a file nor 2.5 GiB.
        let found = advice(&guest);
        assert!(
            !names(&found)
                .iter()
                .any(|name| name.contains("transparent") || name.contains("pages of 1 GiB"))
        );

        let xml = "<domain><memory unit='GiB'>4</memory></domain>";
        let guest = super::super::guest::libvirt(xml, 2 << 20).unwrap();
        for (finding, line) in [
            (
                "transparent huge pages",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            ),
            (
                "hugetlb pages of 2 MiB",
                "pool=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages\n\
                 echo $(($(cat $pool) + 2048)) > $pool\n\
                 in <memoryBacking>: <hugepages><page size='2' unit='M'/></hugepages>",
            ),
            (
                "fault in by 4 threads",
                "in <memoryBacking>: <allocation mode='immediate' threads='4'/>",
            ),
            (
                "iommufd instead of type 1",
                "in <hostdev>: <driver name='vfio' iommufd='yes'/>",
            ),
        ] {
            assert_eq!(lines(&guest, finding), line);
        }
    }

    #[test]
    fn a_change_that_is_made_or_has_no_known_setting_is_no_advice() {
        let huge = of(Ram {
            bytes: 4 * GIB,
            pool_bytes: Some(GIB),
            shared: true,
            prealloc_threads: 8,
            ..Ram::default()
        });
        let huge = Guest {
            interface: Some(Interface::Iommufd),
            ..huge
        };
        assert_eq!(advice(&huge), []);
        let mut small = of(Ram {
            bytes: 4 * GIB,
            ..Ram::default()
        });
        small.monitor = Monitor::Firecracker;
        assert_eq!(names(&advice(&small)), ["hugetlb pages of 2 MiB"]);
        small.monitor = Monitor::Qemu;
        small.interface = Some(Interface::Iommufd);
        small.memory[0].pool_bytes = Some(2 * MIB);
        let found = advice(&small);
        assert!(
            !names(&found).contains(&"iommufd instead of type 1"),
            "{found:?}"
        );
    }

    #[test]
    fn disks_stay_with_type_1_and_private_memory_has_pages_of_its_own() {
        let disk = advice(&qemu("qemu -m 4G -drive file=nvme://01:00.0/1,if=none"));
        assert!(names(&disk).contains(&"transparent huge pages"));
        assert!(!names(&disk).contains(&"iommufd instead of type 1"));
        let guest = |kind| {
            let object = format!("-object {kind},id=a -machine q35,confidential-guest-support=a");
            names(&advice(&qemu(&format!("qemu -m 4G {object}")))).join(", ")
        };
        assert!(guest("sev-guest").contains("huge"));
        let private = guest("sev-snp-guest");
        assert!(
            !private.contains("huge") && private.contains("iommufd"),
            "{private}"
        );
    }

    #[test]
    fn together_is_less_than_each_and_without_times_pages_decide() {
        let guest = qemu("qemu -m 4G");
        let (start, found) = StartReport::of(&guest, &HOST, None, Some(&speeds()));
        let each = found.iter().filter(|advice| !advice.reboot);
        let each = each
            .filter_map(|advice| advice.estimate)
            .map(|estimate| estimate.total_ns);
        assert!(start.together.unwrap().total_ns < each.min().unwrap());
        let (start, found) = StartReport::of(&guest, &HOST, None, None);
        assert_eq!((start.type1, start.together), (None, None));
        let expected = [
            "transparent huge pages",
            "hugetlb pages of 2 MiB",
            "hugetlb pages of 1 GiB",
        ];
        assert_eq!(names(&found), expected);
    }
}
