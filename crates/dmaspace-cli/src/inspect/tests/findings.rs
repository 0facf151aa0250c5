//! What is said of made-up machines.

use std::fs;

use crate::inspect::{Ats, MachineReport};

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

    fn report(&self) -> MachineReport {
        MachineReport::read(&self.places(), &self.path("proc")).unwrap()
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

fn settings(report: &MachineReport) -> Vec<(&str, &str)> {
    let pairs = report.findings.iter();
    pairs
        .map(|found| (found.finding.as_str(), found.setting.as_str()))
        .collect()
}

#[test]
fn the_user_of_a_machine_without_an_iommu_learns_how_to_get_one() {
    let machine = Machine::new("quiet root=/dev/vda\n");
    let report = machine.report();
    assert_eq!(
        (
            report.units.len(),
            report.groups.len(),
            report.options.len()
        ),
        (0, 0, 0)
    );
    let [(finding, setting)] = settings(&report)[..] else {
        panic!("{:?}", report.findings);
    };
    assert!(finding.starts_with("no IOMMU"));
    assert!(setting.contains("intel_iommu=on"));
    assert_eq!(report.missing, []);
}

#[test]
fn without_sysfs_an_iommu_is_not_known_rather_than_missing() {
    let machine = Machine::new("quiet");
    fs::remove_dir_all(machine.path("sys")).unwrap();
    // A directory in which nothing is mounted, and none at all.
    for _ in 0..2 {
        let report = machine.report();
        assert_eq!(report.findings, []);
        assert_eq!(report.missing[0].what, "IOMMU");
        assert!(!report.knows_units());
        fs::create_dir_all(machine.path("sys")).unwrap();
    }
}

#[test]
fn every_finding_names_its_setting() {
    let machine = Machine::new("quiet intel_iommu=on iommu.strict=1 hugepages=8 iommufoo=1\n");
    // ATS off behind another capability, on, none, and a list that leads back to itself.
    let mut turns = config(&[(1, 0)]);
    turns[0x103] = 0x10;
    machine.device(
        "0000:00:03.0",
        1,
        "DMA",
        "dmar0",
        0,
        &config(&[(1, 0), (0xf, 0x0000)]),
    );
    machine.device(
        "0000:00:04.0",
        2,
        "DMA-FQ",
        "dmar0",
        0,
        &config(&[(0xf, 0x8000)]),
    );
    machine.device(
        "0000:80:00.0",
        3,
        "identity",
        "dmar1",
        0,
        &config(&[(1, 0)]),
    );
    machine.device("0000:80:01.0", 4, "unmanaged", "dmar1", 1, &turns);
    // 2 MiB pages, device TLBs, dirty bits.
    machine.file("sys/class/iommu/dmar0/intel-iommu/cap", "400000000\n");
    machine.file("sys/class/iommu/dmar0/intel-iommu/ecap", "200000000004\n");
    machine.file("sys/bus/event_source/devices/dmar0/events/iotlb_hit", "x");
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
        "6,1,1,-;DMAR: IOMMU enabled\n\
         3,2,2,-;DMAR: [DMA Write NO_PASID] Request device [00:03.0] fault addr 0x1000 [fault reason 0x05]\n\
         3,3,3,-;AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0001 address=0x2000]\n",
    );
    let report = machine.report();
    assert_eq!(
        report.options,
        ["intel_iommu=on", "iommu.strict=1", "hugepages=8"]
    );
    let units: Vec<_> = report
        .units
        .iter()
        .map(|u| (u.name.as_str(), u.node, u.devices))
        .collect();
    assert_eq!(units, [("dmar0", Some(0), 2), ("dmar1", None, 2)]);
    assert_eq!(
        report.units[0].can,
        [
            "2 MiB pages",
            "device TLBs",
            "dirty bits in second-stage tables"
        ]
    );
    assert_eq!(report.units[0].counters, ["iotlb_hit"]);
    let domains: Vec<_> = report
        .groups
        .iter()
        .map(|g| g.domain.as_deref().unwrap())
        .collect();
    assert_eq!(domains, ["DMA", "DMA-FQ", "identity", "unmanaged"]);
    let ats: Vec<_> = report
        .groups
        .iter()
        .map(|g| g.devices[0].ats.unwrap())
        .collect();
    assert_eq!(ats, [Ats::Off, Ats::On, Ats::None, Ats::None]);
    // The firmware knows better than devices that disagree.
    machine.file("sys/devices/system/node/node0/cpulist", "0-3\n");
    machine.file("sys/devices/system/node/node1/cpulist", "4-7\n");
    machine.file("sys/class/iommu/dmar1/device/numa_node", "1\n");
    assert_eq!(machine.report().units[1].node, Some(1));
    assert_eq!(report.fault_count, 2);
    assert!(report.faults[0].contains("00:03.0") && report.faults[1].contains("IO_PAGE_FAULT"));

    let found = settings(&report);
    for (finding, setting) in [
        ("1 groups flush strictly", "iommu.strict=0"),
        ("1 groups are not translated", "iommu.passthrough=0"),
        ("VFIO maps page by page", "disable_hugepages=0"),
        (
            "transparent huge pages are off",
            "transparent_hugepage/enabled",
        ),
        ("the device TLB (ATS) of 0000:00:03.0 is off", "noats"),
        ("dmar1 serves devices of the nodes [0, 1]", "numa"),
        ("the kernel's log contains 2 DMA faults", "tables walk"),
    ] {
        let there = found
            .iter()
            .any(|(f, s)| f.starts_with(finding) && s.contains(setting));
        assert!(there, "{finding}: {found:?}");
    }
    assert_eq!(found.len(), 7, "{found:?}");
}

#[test]
fn what_takes_privilege_is_said() {
    let machine = Machine::new("quiet");
    machine.device("0000:00:03.0", 1, "DMA-FQ", "dmar0", 0, &[0; 64]);
    fs::remove_file(machine.path("dev/kmsg")).unwrap();
    fs::remove_file(machine.path("proc/cmdline")).unwrap();
    let report = machine.report();
    let missing: Vec<_> = report.missing.iter().map(|missing| missing.what).collect();
    assert_eq!(missing, ["options", "ATS", "faults"]);
    assert_eq!(report.groups[0].devices[0].ats, None);
}

#[test]
fn of_many_faults_the_newest_are_kept_and_all_are_counted() {
    let machine = Machine::new("quiet");
    let line = |nth| format!("4,{nth},1,-;DMAR: [DMA Write NO_PASID] fault addr {nth}\n");
    machine.file("dev/kmsg", (0..25).map(line).collect::<String>());
    let report = machine.report();
    assert_eq!(report.fault_count, 25);
    let kept: Vec<_> = (5..25).map(|nth| line(nth).trim().to_owned()).collect();
    assert_eq!(report.faults, kept);
}

#[test]
fn a_log_without_an_end_is_missing_with_its_limit() {
    let machine = Machine::new("quiet");
    fs::remove_file(machine.path("dev/kmsg")).unwrap();
    machine.link("dev/kmsg", "/dev/zero");
    let report = machine.report();
    let [missing] = &report.missing[..] else {
        panic!("{:?}", report.missing);
    };
    assert_eq!(missing.what, "faults");
    let why = "it has more than 64 MiB, the most that is read";
    assert!(missing.why.ends_with(why), "{}", missing.why);
}
