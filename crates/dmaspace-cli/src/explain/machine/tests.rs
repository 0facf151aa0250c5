//! Findings on made-up machines.

use std::fs;

use super::super::finding::{Certainty, Finding, Report};
use super::super::of_machine;
use crate::test_files::Files;

struct Machine(Files);

impl std::ops::Deref for Machine {
    type Target = Files;

    fn deref(&self) -> &Files {
        &self.0
    }
}

impl Machine {
    fn new(cmdline: &str) -> Self {
        let machine = Self(Files::new());
        machine.file("proc/cmdline", cmdline);
        machine.file("dev/kmsg", "");
        machine.file("sys/kernel/uevent_seqnum", "1\n");
        machine
    }

    /// A network card in a group that translates like this.
    fn device(
        &self,
        address: &str,
        group: u32,
        domain: &str,
        unit: &str,
        node: i32,
        config: &[u8],
    ) {
        let real = format!("sys/bus/pci/devices/{address}");
        self.pci(&real, 0x02_0000, node);
        self.file(&format!("{real}/config"), config);
        let path = format!("sys/kernel/iommu_groups/{group}");
        self.file(&format!("{path}/type"), format!("{domain}\n"));
        self.link(&format!("{path}/devices/{address}"), self.path(&real));
        self.link(&format!("{real}/iommu_group"), self.path(&path));
        self.link(
            &format!("{real}/iommu"),
            self.path(&format!("sys/class/iommu/{unit}")),
        );
    }

    fn driver(&self, address: &str, driver: &str) {
        let path = format!("sys/bus/pci/drivers/{driver}");
        self.directory(&path);
        let link = format!("sys/bus/pci/devices/{address}/driver");
        self.link(&link, self.path(&path));
    }

    fn report(&self) -> Report {
        self.report_with(&[])
    }

    fn report_with(&self, given: &[(&str, &str)]) -> Report {
        of_machine(&self.places(), &self.path("proc"), given).unwrap()
    }

    /// Notes that name this file, without its path.
    fn notes(&self, report: &Report, file: &str) -> Vec<String> {
        let start = format!("{}: ", self.path(file).display());
        let notes = report.notes.iter();
        notes
            .filter_map(|note| note.strip_prefix(&start))
            .map(str::to_owned)
            .collect()
    }
}

/// Configuration space with extended capabilities one behind the other: number and control word.
fn config(capabilities: &[(u32, u32)]) -> Vec<u8> {
    let mut space = vec![0; 4096];
    for (nth, (number, control)) in capabilities.iter().enumerate() {
        let at = 0x100 + 0x20 * nth;
        let next = if nth + 1 < capabilities.len() {
            at as u32 + 0x20
        } else {
            0
        };
        let head = number | 1 << 16 | next << 20;
        space[at..at + 4].copy_from_slice(&head.to_le_bytes());
        space[at + 4..at + 8].copy_from_slice(&(control << 16).to_le_bytes());
    }
    space
}

fn causes(report: &Report) -> Vec<&str> {
    report.findings.iter().map(|one| one.cause).collect()
}

fn finding<'r>(report: &'r Report, cause: &str) -> &'r Finding {
    let mut all = report.findings.iter();
    all.find(|one| one.cause == cause)
        .unwrap_or_else(|| panic!("{cause}: {:?}", causes(report)))
}

fn advice(finding: &Finding) -> String {
    let lines = finding.advice.iter().map(|one| one.line());
    lines.collect::<Vec<_>>().join("\n")
}

const DOMAIN: &str = "<domain type='kvm'><memory unit='GiB'>4</memory><devices><hostdev mode='subsystem' type='pci' \
    managed='yes'><source><address domain='0' bus='0x03' slot='0' function='0'/></source></hostdev></devices></domain>\n";

#[test]
fn the_user_of_a_machine_without_an_iommu_learns_how_to_get_one() {
    let machine = Machine::new("quiet root=/dev/vda\n");
    machine.pci("sys/bus/pci/devices/0000:00:03.0", 0x02_0000, 0);
    let report = machine.report();
    assert_eq!(causes(&report), ["firmware.no-unit"]);
    assert_eq!(report.findings[0].certainty, Certainty::Likely);
    // Firmware that shows its tables, first without one of units.
    machine.file("sys/firmware/acpi/tables/APIC", "x");
    let report = machine.report();
    assert_eq!(causes(&report), ["firmware.no-unit"]);
    assert_eq!(report.findings[0].certainty, Certainty::Certain);
    assert!(advice(&report.findings[0]).contains("VT-d"));
    machine.file("sys/firmware/acpi/tables/DMAR", "DMAR\x30\0\0\0");
    let report = machine.report();
    let off = finding(&report, "option.unit-off");
    assert!(advice(off).contains("intel_iommu=on"), "{off:?}");
    machine.file("proc/cmdline", "intel_iommu=off root=/dev/vda\n");
    let report = machine.report();
    let off = finding(&report, "option.unit-off");
    assert!(advice(off).contains("Remove intel_iommu=off"), "{off:?}");
    assert_eq!(off.evidence.len(), 2);
}

#[test]
fn without_sysfs_an_iommu_is_not_known_rather_than_missing() {
    let machine = Machine::new("quiet");
    fs::remove_dir_all(machine.path("sys")).unwrap();
    // A directory in which nothing is mounted, and none at all.
    for _ in 0..2 {
        let report = machine.report();
        assert_eq!(causes(&report), [""; 0]);
        let notes = machine.notes(&report, "sys");
        assert!(
            notes[0].starts_with("nothing is mounted there"),
            "{notes:?}"
        );
        fs::create_dir_all(machine.path("sys")).unwrap();
    }
}

#[test]
fn every_finding_names_its_setting_and_its_file() {
    let machine = Machine::new("quiet intel_iommu=on iommu.strict=1 pci=noats hugepages=8\n");
    // ATS off behind another capability, on, none, and a list that leads back to itself.
    let mut turns = config(&[(1, 0)]);
    turns[0x103] = 0x10;
    let off = config(&[(1, 0), (0xf, 0x0000)]);
    machine.device("0000:00:03.0", 1, "DMA", "dmar0", 0, &off);
    let on = config(&[(0xf, 0x8000)]);
    machine.device("0000:00:04.0", 2, "DMA-FQ", "dmar0", 0, &on);
    let none = config(&[(1, 0)]);
    machine.device("0000:80:00.0", 3, "identity", "dmar1", 0, &none);
    machine.device("0000:80:01.0", 4, "unmanaged", "dmar1", 1, &turns);
    // A guest's device: the group's own type is that of no domain in use.
    machine.device("0000:80:02.0", 5, "DMA", "dmar1", 1, &none);
    machine.driver("0000:80:02.0", "vfio-pci");
    for address in [
        "0000:00:03.0",
        "0000:00:04.0",
        "0000:80:00.0",
        "0000:80:01.0",
    ] {
        machine.driver(address, "e1000e");
    }
    // 2 MiB pages, 39 bits, device TLBs.
    machine.file("sys/class/iommu/dmar0/intel-iommu/cap", "400260000\n");
    machine.file("sys/class/iommu/dmar0/intel-iommu/ecap", "4\n");
    machine.file(
        "sys/module/vfio_iommu_type1/parameters/disable_hugepages",
        "Y\n",
    );
    machine.file(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always madvise [never]\n",
    );
    machine.file(
        "dev/kmsg",
        "6,1,1000000,-;DMAR: IOMMU enabled\n SUBSYSTEM=x\n\
         3,2,2000000,-;DMAR: [DMA Write NO_PASID] Request device [00:03.0] fault addr 0x1000000000 [fault reason 0x05] PTE Write access is not set\n",
    );
    let report = machine.report();
    let expected = [
        (
            "fault.no-access",
            "[\"0000:00:03.0\"]",
            "dma_debug_driver",
            "dev/kmsg",
        ),
        ("group.far-unit", "[]", "numa", "class/iommu/dmar1"),
        (
            "option.small-maps",
            "[]",
            "disable_hugepages=0",
            "parameters/disable_hugepages",
        ),
        (
            "pages.transparent-off",
            "[]",
            "madvise",
            "transparent_hugepage/enabled",
        ),
        (
            "group.strict",
            "[\"0000:00:03.0\"]",
            "iommu.strict=0",
            "iommu_groups/1/type",
        ),
        (
            "group.identity",
            "[\"0000:80:00.0\"]",
            "iommu.passthrough=0",
            "iommu_groups/3/type",
        ),
        (
            "option.ats-off",
            "[\"0000:00:03.0\"]",
            "Remove noats",
            "0000:00:03.0/config",
        ),
    ];
    assert_eq!(causes(&report), expected.map(|(cause, ..)| cause));
    for (cause, devices, setting, file) in expected {
        let one = finding(&report, cause);
        assert_eq!(format!("{:?}", one.devices), devices, "{cause}");
        assert!(advice(one).contains(setting), "{cause}: {:?}", one.advice);
        let places = report.places(&one.evidence).join(" ");
        assert!(places.contains(file), "{cause}: {places}");
        assert!(one.certainty == Certainty::Certain, "{cause}");
    }
    // The number of a record in the log is its line.
    let fault = finding(&report, "fault.no-access");
    let log = machine.path("dev/kmsg");
    assert_eq!(
        report.places(&fault.evidence),
        [format!("{}:2", log.display())]
    );
    assert!(
        fault.text.contains("It is in IOMMU group 1"),
        "{}",
        fault.text
    );
    // Options that the kernel's tables for each node need.
    machine.file("sys/module/iommu/parameters/node_domains", "N\n");
    let report = machine.report();
    let far = finding(&report, "group.far-unit");
    assert!(advice(far).contains("iommu.node_domains=1"), "{far:?}");
    machine.file("sys/module/iommu/parameters/node_domains", "Y\n");
    assert!(!causes(&machine.report()).contains(&"group.far-unit"));
}

#[test]
fn without_noats_the_reason_of_a_tlb_that_is_off_is_unknown() {
    let machine = Machine::new("quiet\n");
    let off = config(&[(0xf, 0)]);
    machine.device("0000:00:03.0", 1, "DMA-FQ", "ivhd0", 0, &off);
    let report = machine.report();
    assert_eq!(
        finding(&report, "option.ats-off").certainty,
        Certainty::Unknown
    );
    // A unit that serves no TLBs of devices leaves them off.
    let machine = Machine::new("quiet\n");
    machine.device("0000:00:03.0", 1, "DMA-FQ", "dmar0", 0, &off);
    machine.file("sys/class/iommu/dmar0/intel-iommu/cap", "400260000\n");
    machine.file("sys/class/iommu/dmar0/intel-iommu/ecap", "0\n");
    assert_eq!(causes(&machine.report()), [""; 0]);
}

#[test]
fn facts_that_require_root_are_named() {
    let machine = Machine::new("quiet");
    machine.device("0000:00:03.0", 1, "DMA-FQ", "dmar0", 0, &[0; 64]);
    fs::remove_file(machine.path("dev/kmsg")).unwrap();
    fs::remove_file(machine.path("proc/cmdline")).unwrap();
    machine.file("proc/iomem", "00000000-00000000 : System RAM\n");
    // A table that only root can read: for root a folder is as unreadable.
    machine.directory("sys/firmware/acpi/tables/DMAR");
    let report = machine.report();
    for (file, part) in [
        ("dev/kmsg", "requires root (CAP_SYSLOG)"),
        ("proc/cmdline", "cannot be read"),
        ("sys/bus/pci/devices", "requires root (CAP_SYS_ADMIN)"),
        ("sys/firmware/acpi/tables/DMAR", "which requires root"),
    ] {
        let notes = machine.notes(&report, file);
        assert!(
            notes.len() == 1 && notes[0].contains(part),
            "{file}: {:?}",
            report.notes
        );
    }
    let hidden = "/proc/iomem hides its addresses";
    assert!(report.notes.iter().any(|note| note.starts_with(hidden)));
}

#[test]
fn a_group_that_a_driver_of_the_host_holds_is_found_once_somebody_wants_it() {
    let machine = Machine::new("quiet");
    for function in 0..4 {
        let address = format!("0000:03:00.{function}");
        machine.device(&address, 7, "DMA-FQ", "dmar0", 0, &config(&[]));
        machine.driver(&address, "igb");
    }
    assert_eq!(causes(&machine.report()), [""; 0]);
    let report = machine.report_with(&[("domain.xml", DOMAIN)]);
    let held = finding(&report, "group.not-viable");
    assert_eq!(held.devices.len(), 4);
    // One command for all members.
    let command = "for d in 0000:03:00.0 0000:03:00.1 0000:03:00.2 0000:03:00.3; do driverctl set-override \"$d\" \
                   vfio-pci; done";
    assert_eq!(held.advice[0].line(), command);
    let places = report.places(&held.evidence);
    let driver = machine.path("sys/bus/pci/devices/0000:03:00.0/driver");
    assert!(places.contains(&driver.display().to_string()), "{places:?}");
}

#[test]
fn a_reserved_region_is_of_its_group() {
    let machine = Machine::new("quiet");
    machine.device("0000:03:00.0", 7, "DMA-FQ", "dmar0", 0, &config(&[]));
    machine.device("0000:04:00.0", 8, "DMA-FQ", "dmar0", 0, &config(&[]));
    for group in [7, 8] {
        machine.file(
            &format!("sys/kernel/iommu_groups/{group}/reserved_regions"),
            "0x000000007b000000 0x000000007f7fffff direct\n0x00000000fee00000 0x00000000feefffff msi\n",
        );
    }
    // No device of these groups is given away: no layout has to avoid their regions.
    let layout = ("layout.txt", "A ram 0x0 0x80000000\n");
    assert_eq!(causes(&machine.report_with(&[layout])), [""; 0]);
    let report = machine.report_with(&[("domain.xml", DOMAIN), layout]);
    let direct = finding(&report, "firmware.one-to-one");
    assert_eq!(direct.devices, ["0000:03:00.0"]);
    assert_eq!(direct.addresses, [(0x7b00_0000, 0x7f7f_ffff)]);
    let regions = machine.path("sys/kernel/iommu_groups/7/reserved_regions");
    let places = report.places(&direct.evidence);
    assert!(
        places.contains(&format!("{}:1", regions.display())),
        "{places:?}"
    );
    assert!(causes(&report).contains(&"layout.overlaps-reserved"));
    // Regions that may be given up, as those of USB and graphics.
    machine.file(
        "sys/kernel/iommu_groups/7/reserved_regions",
        "0x000000007b000000 0x000000007f7fffff direct-relaxable\n",
    );
    let report = machine.report_with(&[("domain.xml", DOMAIN)]);
    assert!(!causes(&report).contains(&"firmware.one-to-one"));
}

#[test]
fn a_guest_that_does_not_run_is_compared_with_the_free_pages() {
    let machine = Machine::new("quiet");
    let pool = "hugepages/hugepages-2048kB/free_hugepages";
    machine.file(&format!("sys/kernel/mm/{pool}"), "16\n");
    // Free, and promised to another.
    let promised = pool.replace("free", "resv");
    machine.file(&format!("sys/kernel/mm/{promised}"), "3\n");
    machine.file(&format!("sys/devices/system/node/node0/{pool}"), "12\n");
    machine.file(&format!("sys/devices/system/node/node1/{pool}"), "4\n");
    let line = "qemu-system-x86_64 -m 64M -object memory-backend-file,id=m,size=64M,mem-path=/dev/hugepages,share=on \
                -machine q35,memory-backend=m -device vfio-pci,host=03:00.0\n";
    let report = machine.report_with(&[("line.txt", line)]);
    let short = finding(&report, "pages.short");
    assert!(
        short
            .text
            .contains("needs 32 pages of 2 MiB, and 13 are free"),
        "{}",
        short.text
    );
    // A guest that runs has its pages.
    machine.file("proc/17/cmdline", line.trim_end().replace(' ', "\0"));
    machine.file(
        "proc/17/limits",
        "Limit  Soft  Hard  Units\nMax locked memory         8388608              8388608              bytes\n",
    );
    machine.file("proc/18/cmdline", "sh\0-c\0qemu-system-x86_64 -m 64M\0");
    let report = machine.report();
    assert!(
        !causes(&report).contains(&"pages.short"),
        "{:?}",
        causes(&report)
    );
    let notes = machine.notes(&report, "proc/17/limits");
    let limit = "qemu-system-x86_64 runs with a limit of locked memory of 8388608 bytes";
    assert_eq!(notes, [limit]);
    let read = report
        .contents
        .iter()
        .map(|(file, _)| report.files[*file].as_str());
    let line = machine.path("proc/17/cmdline").display().to_string();
    assert!(read.into_iter().any(|file| file == line));
}

#[test]
fn a_log_without_an_end_is_named_with_its_limit() {
    let machine = Machine::new("quiet");
    fs::remove_file(machine.path("dev/kmsg")).unwrap();
    machine.link("dev/kmsg", "/dev/zero");
    let report = machine.report();
    let notes = machine.notes(&report, "dev/kmsg");
    let why = "it has more than 64 MiB, the most that is read";
    assert!(notes.len() == 1 && notes[0].ends_with(why), "{notes:?}");
}

#[test]
fn this_machine_is_read() {
    let report = of_machine(&dmaspace::devices::Places::default(), "/proc".as_ref(), &[]);
    assert!(!report.unwrap().files.is_empty());
}
