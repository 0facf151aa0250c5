//! Needs beside made-up hosts.

use dmaspace::layout::ReservedRange;

use super::need::{mappings as ram_mappings, pieces, ranges};
use super::*;
use crate::inspect::{Monitor, libvirt, qemu_line};
use crate::test_files::Files;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn qemu(line: &str) -> Guest {
    qemu_line(line, 2 * MIB).unwrap()
}

fn domain(inside: &str) -> Guest {
    let text = format!("<domain><memory unit='GiB'>8</memory>{inside}</domain>");
    libvirt(&text, 2 * MIB).unwrap()
}

const HOSTDEV: &str = "<hostdev mode='subsystem' type='pci'><source><address bus='1'/></source></hostdev>\
    <hostdev mode='subsystem' type='pci'><source><address bus='2'/></source></hostdev>";

fn causes(report: &NeedsReport) -> Vec<(&'static str, bool)> {
    let findings = report.findings.iter();
    findings.map(|one| (one.cause, one.likely)).collect()
}

/// A host with two nodes, a process of a user, and two devices of one unit.
struct Machine(Files);

impl std::ops::Deref for Machine {
    type Target = Files;

    fn deref(&self) -> &Files {
        &self.0
    }
}

impl Machine {
    fn new(linux: &str) -> Self {
        let machine = Self(Files::new());
        machine.file("proc/sys/kernel/osrelease", linux);
        machine.limit("self", "8388608", "0000000000000000");
        machine
    }

    fn limit(&self, process: &str, soft: &str, caps: &str) {
        let line = format!("Max locked memory         {soft}     {soft}     bytes\n");
        self.file(&format!("proc/{process}/limits"), line)
            .file(
                &format!("proc/{process}/status"),
                format!("CapEff:\t{caps}\n"),
            )
            .file(&format!("proc/{process}/uid_map"), "0 0 4294967295\n");
    }

    /// A pool together, and free pages of each node.
    fn pool(&self, kib: u64, promised: u64, growth: u64, nodes: &[u64]) {
        let all = format!("sys/kernel/mm/hugepages/hugepages-{kib}kB");
        let free: u64 = nodes.iter().sum();
        self.file(&format!("{all}/free_hugepages"), format!("{free}\n"))
            .file(&format!("{all}/resv_hugepages"), format!("{promised}\n"))
            .file(
                &format!("{all}/nr_overcommit_hugepages"),
                format!("{growth}\n"),
            )
            .file(&format!("{all}/surplus_hugepages"), "0\n");
        for (node, free) in nodes.iter().enumerate() {
            let path = format!("sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB");
            self.file(&format!("{path}/free_hugepages"), format!("{free}\n"));
        }
    }

    fn device(&self, address: &str, resource: &str, reserved: &str, cap: u64) {
        let folder = format!("sys/bus/pci/devices/{address}");
        self.file(&format!("{folder}/resource"), resource)
            .file(&format!("{folder}/iommu_group/reserved_regions"), reserved)
            .file(
                &format!("{folder}/iommu/intel-iommu/cap"),
                format!("{cap:x}\n"),
            );
    }

    fn report(&self, guest: &Guest) -> NeedsReport {
        NeedsReport::of(guest, &self.path(""))
    }
}

/// MGAW and SAGAW of a capability register.
const fn cap(width: u64, tables: u64) -> u64 {
    (width - 1) << 16 | tables << 8
}

const BOUND: &str = "-object memory-backend-memfd,id=a,size=2G,hugetlb=on,host-nodes=0,policy=bind \
    -object memory-backend-memfd,id=b,size=2G,hugetlb=on,host-nodes=1,policy=bind -numa node,memdev=a -numa node,memdev=b";

#[test]
fn pages_of_one_pool_add_up_and_nodes_are_apart() {
    let guest = qemu(&format!("qemu -m 4G {BOUND}"));
    let needs = pool_needs(&guest);
    let pools: Vec<_> = needs
        .iter()
        .map(|one| (one.pages, one.nodes.clone()))
        .collect();
    assert_eq!(pools, [(1024, vec![0]), (1024, vec![1])]);
    for (free, promised, growth, expected) in [
        ([1024, 1024], 0, 0, None),
        (
            [1024, 1024],
            1,
            0,
            Some(("pages.short", "/sys/kernel/mm/hugepages/", 1)),
        ),
        (
            [1024, 1023],
            0,
            0,
            Some(("pages.short", "/sys/kernel/mm/hugepages/", 1)),
        ),
        (
            [1000, 2000],
            0,
            0,
            Some(("pages.short-on-node", "/sys/devices/system/node/node0/", 24)),
        ),
        // Pages that come as they are asked for.
        ([1000, 2000], 0, 24, None),
        ([0, 0], 0, 2048, None),
        (
            [0, 0],
            0,
            2047,
            Some(("pages.short", "/sys/kernel/mm/hugepages/", 2048)),
        ),
    ] {
        let machine = Machine::new("6.18.0\n");
        machine.pool(2048, promised, growth, &free);
        let report = machine.report(&guest);
        let found = report.findings.first().map(|one| {
            let Some(Remedy::Raise { file, pages }) = one.advice.first() else {
                panic!("{one:?}");
            };
            (one.cause, file.clone(), *pages)
        });
        match (&found, expected) {
            (Some((cause, file, pages)), Some((of, folder, more))) => {
                assert_eq!((*cause, *pages), (of, more));
                assert!(file.starts_with(folder), "{file}");
            }
            (found, expected) => {
                assert_eq!(found.is_some(), expected.is_some(), "{found:?} {free:?}")
            }
        }
        let missing = report.pools.iter().any(|pool| pool.missing_pages > 0);
        assert_eq!(missing, expected.is_some(), "{free:?}");
    }
    // Nothing is said of a pool whose counts are not known.
    assert_eq!(causes(&Machine::new("6.18.0\n").report(&guest)), []);
}

#[test]
fn several_nodes_of_one_object_are_one_pool_and_overlapping_sets_are_summed() {
    let both = "-object memory-backend-memfd,id=a,size=4G,hugetlb=on,host-nodes=0-1,policy=bind";
    let guest = |more: &str| {
        qemu(&format!(
            "qemu -m 4G -machine q35,memory-backend=a {both} {more}"
        ))
    };
    let machine = Machine::new("6.18.0\n");
    machine.pool(2048, 0, 0, &[1500, 548, 1000]);
    assert_eq!(causes(&machine.report(&guest(""))), []);
    let module = "-object memory-backend-memfd,id=b,size=2M,hugetlb=on,host-nodes=1,policy=bind -device pc-dimm,memdev=b";
    let report = machine.report(&guest(module));
    assert_eq!(causes(&report), [("pages.short-on-node", false)]);
    assert!(
        report.findings[0]
            .text
            .contains("2049 pages of 2 MiB from node 0, 1"),
        "{report:?}"
    );
    // All of it on one node, with too few pages in all: the pages must come there.
    let one = qemu(&format!(
        "qemu -m 4G -machine q35,memory-backend=a {}",
        both.replace("0-1", "1")
    ));
    machine.pool(2048, 0, 0, &[100, 40, 0]);
    let found = machine.report(&one).findings;
    let file = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
    assert_eq!(
        found[0].advice[0],
        Remedy::Raise {
            file: file.into(),
            pages: 2008
        }
    );
}

#[test]
fn locked_memory_is_counted_by_interface() {
    let two = "-device vfio-pci,host=01:00.0 -device vfio-pci,host=02:00.0";
    let iommufd = "-object iommufd,id=i -device vfio-pci,host=01:00.0,iommufd=i -device vfio-pci,host=02:00.0,iommufd=i";
    let disk = "-drive file=nvme://03:00.0/1,if=none";
    let mdev =
        "-device vfio-pci,sysfsdev=/sys/bus/mdev/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
    let pool = "-mem-path /dev/hugepages";
    for (line, times, counter, at_start) in [
        (two.to_owned(), 1, LockCounter::Process, true),
        (format!("{two} {pool}"), 1, LockCounter::Process, true),
        (
            format!("{two} -device intel-iommu"),
            2,
            LockCounter::Process,
            true,
        ),
        (iommufd.to_owned(), 1, LockCounter::User, true),
        (
            format!("{iommufd} -device intel-iommu"),
            2,
            LockCounter::User,
            true,
        ),
        (disk.to_owned(), 1, LockCounter::Process, true),
        (format!("{two} {disk}"), 2, LockCounter::Process, true),
        (mdev.to_owned(), 1, LockCounter::Process, false),
        (format!("{mdev} {two}"), 1, LockCounter::Process, true),
        (
            "-device vfio-pci,fd=22".into(),
            1,
            LockCounter::Process,
            true,
        ),
        (
            format!("{two} -object tdx-guest,id=t -machine confidential-guest-support=t"),
            1,
            LockCounter::Process,
            false,
        ),
    ] {
        let need = LockNeed::of(&qemu(&format!("qemu -m 4G {line}"))).unwrap();
        let found = (need.bytes(), need.counter, need.at_start);
        assert_eq!(found, (times * 4 * GIB, counter, at_start), "{line}");
    }
    assert_eq!(LockNeed::of(&qemu("qemu -m 4G")), None);
    // libvirt has iommufd count for the process.
    let driver = HOSTDEV.replace("<source>", "<driver iommufd='yes'/><source>");
    let guest = domain(&format!("<devices>{driver}</devices>"));
    let need = LockNeed::of(&guest).unwrap();
    assert_eq!(
        (need.interface, need.counter),
        (Interface::Iommufd, LockCounter::Process)
    );
    // Memory of a pool is not counted by mlock; the same limit holds for both counts.
    let need = LockNeed::of(&qemu(&format!("qemu -m 4G -overcommit mem-lock=on {two}"))).unwrap();
    assert_eq!(
        (need.mlocked_bytes, need.counted_bytes()),
        (4 * GIB, 8 * GIB)
    );
    let huge = "-M q35,memory-backend=a -object memory-backend-memfd,id=a,size=4G,hugetlb=on";
    let line = format!("qemu -m 4G -overcommit mem-lock=on {two} {huge}");
    let need = LockNeed::of(&qemu(&line)).unwrap();
    assert_eq!((need.mlocked_bytes, need.counted_bytes()), (0, 4 * GIB));
}

#[test]
fn the_limit_of_the_shell_is_short_by_so_many_bytes() {
    let two = "-device vfio-pci,host=01:00.0 -device vfio-pci,host=02:00.0";
    let of = |soft: &str, caps: &str, more: &str| {
        let machine = Machine::new("6.18.0\n");
        machine.limit("self", soft, caps);
        machine.report(&qemu(&format!("qemu -m 4G {two} {more}")))
    };
    let low = of("8388608", "0", "");
    assert_eq!(causes(&low), [("memlock.too-low", false)]);
    let text = &low.findings[0].text;
    for part in [
        "8 MiB",
        "4 GiB (4294967296 bytes) are needed",
        "4286578688",
        "of this shell",
        "mm->locked_vm",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(low.advice()[0].setting[0], "ulimit -l 4194304");
    assert_eq!(causes(&of("4294967296", "0", "")), []);
    assert_eq!(causes(&of("unlimited", "0", "")), []);
    // CAP_IPC_LOCK, in the first user namespace.
    assert_eq!(causes(&of("8388608", "4000", "")), []);
    let machine = Machine::new("6.18.0\n");
    machine.limit("self", "8388608", "4000");
    machine.file("proc/self/uid_map", "0 1000 1\n");
    let report = machine.report(&qemu(&format!("qemu -m 4G {two}")));
    assert_eq!(causes(&report), [("memlock.too-low", false)]);
    // Once for each device.
    let each = of("4294967296", "0", "-device intel-iommu");
    assert_eq!(causes(&each), [("memlock.per-device", false)]);
    assert_eq!(each.findings[0].devices.len(), 2);
    // Private memory is counted as far as the guest shares it.
    let shared = of(
        "8388608",
        "0",
        "-object tdx-guest,id=t -machine confidential-guest-support=t",
    );
    assert!(
        causes(&shared).contains(&("memlock.too-low", true)),
        "{shared:?}"
    );
}

#[test]
fn libvirt_sets_the_limit_unless_the_domain_has_its_own() {
    let machine = Machine::new("6.18.0\n");
    let devices = format!("<devices>{HOSTDEV}</devices>");
    let report = machine.report(&domain(&devices));
    let lock = report.locked.clone().unwrap();
    assert_eq!(
        (lock.limit_of, lock.limit_bytes),
        (Some("libvirt"), Some(9 * GIB))
    );
    assert_eq!(causes(&report), []);
    let iommu = format!("<devices>{HOSTDEV}<iommu model='intel'/></devices>");
    let lock = machine.report(&domain(&iommu)).locked.unwrap();
    // As it refused to set it in a report: 18253611008.
    assert_eq!(lock.limit_bytes, Some(18_253_611_008));
    let limit = format!("<memtune><hard_limit unit='GiB'>7</hard_limit></memtune>{devices}");
    let report = machine.report(&domain(&limit));
    assert_eq!(causes(&report), [("memlock.too-low", false)]);
    assert!(
        report.findings[0].text.contains("<hard_limit>"),
        "{report:?}"
    );
}

#[test]
fn mappings_run_out_with_pieces_only() {
    let device = "-device vfio-pci,host=01:00.0";
    let blocks = |size: &str, more: &str| {
        let object = format!("-object memory-backend-ram,id=v,size={size}");
        qemu(&format!(
            "qemu -m 4G {object} -device virtio-mem-pci,memdev=v,requested-size=1G{more} {device}"
        ))
    };
    let machine = Machine::new("6.18.0\n");
    machine.limit("self", "unlimited", "0");
    let found = |guest: &Guest| causes(&machine.report(guest)).first().copied();
    let short = Some(("memlock.mapping-limit", true));
    assert_eq!(pieces(&blocks("64G", ""))[0].count, 32_768);
    assert_eq!(found(&blocks("64G", "")), None);
    assert_eq!(found(&blocks("128G", "")), short);
    assert_eq!(found(&blocks("128G", ",block-size=4M")), None);
    let tdx = |memory: &str| {
        qemu(&format!(
            "qemu -m {memory} -object tdx-guest,id=t -machine q35,confidential-guest-support=t {device}"
        ))
    };
    // 65,535 pieces of 4 KiB, and the mappings of RAM.
    assert_eq!(found(&tdx("256M")), short);
    assert_eq!(found(&tdx("255M")), None);
    let xml = "<devices><memory model='virtio-mem'><target><size unit='GiB'>64</size><node>0</node>\
        <block unit='KiB'>1024</block><requested unit='GiB'>8</requested></target></memory></devices>";
    let guest = libvirt(
        &format!("<domain><memory unit='GiB'>72</memory>{xml}</domain>"),
        2 * MIB,
    );
    let guest = guest.unwrap();
    let expected = [(64 * GIB, MIB, 65_536)];
    let found: Vec<_> = pieces(&guest)
        .iter()
        .map(|one| (one.bytes, one.piece_bytes, one.count))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(guest.blocks[0].requested_bytes, 8 * GIB);
    // A limit that was changed, and iommufd, which has none.
    machine.file(
        "sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        "1000000\n",
    );
    assert_eq!(causes(&machine.report(&blocks("128G", ""))), []);
    let iommufd = qemu(
        "qemu -m 4G -object tdx-guest,id=t -machine confidential-guest-support=t \
        -object iommufd,id=i -device vfio-pci,host=01:00.0,iommufd=i",
    );
    assert_eq!(machine.report(&iommufd).mappings, None);
}

#[test]
fn ram_is_where_qemu_places_it() {
    let at = |line: &str, amd: bool, arm: bool| {
        let guest = qemu(&format!("qemu {line}"));
        let found = ranges(&guest, amd, arm).into_iter();
        found.map(|one| (one.first, one.last)).collect::<Vec<_>>()
    };
    let low = (0, 0x7fff_ffff);
    assert_eq!(at("-m 2G -M q35", false, false), [low]);
    assert_eq!(
        at("-m 4G -M q35", false, false),
        [low, (4 * GIB, 6 * GIB - 1)]
    );
    assert_eq!(
        at("-m 4G -M pc", false, false),
        [(0, 3 * GIB - 1), (4 * GIB, 5 * GIB - 1)]
    );
    assert_eq!(at("-m 4G -M virt", false, true), [(GIB, 5 * GIB - 1)]);
    assert_eq!(at("-m 4G -M virt", false, false), []);
    assert_eq!(at("-m 4G -M microvm", false, false), []);
    // The last that has its window of BARs below 1,012 GiB: 978 GiB end at 980, and 32 more.
    let high = |first: u64, gib: u64| (first, first + gib * GIB - 1);
    for (gib, first) in [(978, 4 * GIB), (979, 1 << 40)] {
        let line = format!("-m {gib}G -M pc-q35-7.1");
        assert_eq!(at(&line, true, false)[1], high(first, gib - 2));
        assert_eq!(at(&line, false, false)[1], high(4 * GIB, gib - 2));
        let old = line.replace("7.1", "7.0");
        assert_eq!(at(&old, true, false)[1], high(4 * GIB, gib - 2));
    }
    assert_eq!(at("-m 979G -M q35", true, false)[1].0, 1 << 40);
    // As many mappings as objects and ranges.
    assert_eq!(ram_mappings(&qemu("qemu -m 2G -M q35")), 1);
    assert_eq!(
        ram_mappings(&qemu(&format!("qemu -m 4G -M q35 {BOUND}"))),
        2
    );
    assert_eq!(ram_mappings(&qemu(&format!("qemu -m 4G -M pc {BOUND}"))), 3);
}

#[test]
fn ram_is_compared_with_the_devices_groups_and_unit() {
    const HOLE: &str = "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved\n";
    let guest = |machine: &str, memory: &str| {
        qemu(&format!(
            "qemu -M {machine} -m {memory} -device vfio-pci,host=01:00.0"
        ))
    };
    let on = |reserved: &str, cap: u64, guest: &Guest| {
        let machine = Machine::new("6.18.0\n");
        machine.limit("self", "unlimited", "0");
        machine.device("0000:01:00.0", "", reserved, cap);
        machine.report(guest)
    };
    // AMD's range is left out from version 7.1 on.
    let old = on(HOLE, 0, &guest("pc-q35-7.0", "1100G"));
    assert_eq!(causes(&old), [("layout.overlaps-reserved", false)]);
    assert_eq!(
        old.findings[0].addresses,
        [(0xfd_0000_0000, 0xff_ffff_ffff)]
    );
    assert_eq!(causes(&on(HOLE, 0, &guest("pc-q35-7.1", "1100G"))), []);
    assert_eq!(causes(&on(HOLE, 0, &guest("pc-q35-7.0", "1000G"))), []);
    // Ranges that firmware maps: with one the device may be given, with the other it is refused before.
    for kind in ["direct-relaxable", "direct"] {
        let range = format!("0x0000000079000000 0x0000000079000fff {kind}\n");
        assert_eq!(causes(&on(&range, 0, &guest("q35", "4G"))), []);
    }
    let taken = "0x0000000079000000 0x0000000079000fff reserved\n";
    let found = on(taken, 0, &guest("q35", "4G"));
    assert_eq!(found.findings[0].addresses, [(0x7900_0000, 0x7900_0fff)]);
    // Tables of three levels, or a unit of 39 bits.
    for narrow in [cap(48, 0b10), cap(39, 0b110)] {
        let found = on("", narrow, &guest("q35", "600G"));
        assert_eq!(causes(&found), [("layout.address-width", false)]);
        assert_eq!(found.last_address, Some(0x7f_ffff_ffff));
        assert_eq!(found.findings[0].addresses, [(1 << 39, 602 * GIB - 1)]);
        assert_eq!(causes(&on("", narrow, &guest("q35", "500G"))), []);
    }
    assert_eq!(causes(&on("", cap(48, 0b110), &guest("q35", "600G"))), []);
    // A unit that says nothing of its tables.
    assert_eq!(on("", 0, &guest("q35", "600G")).last_address, None);
}

#[test]
fn bars_take_time_with_type_1_and_a_kernel_with_iommufd() {
    const RESOURCE: &str = "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000020000000000 0x0000021fffffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x000000000000e000 0x000001000000efff 0x0000000000040101\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000030000000000 0x000003ffffffffff 0x000000000014220c\n";
    let two = [
        "-device vfio-pci,host=01:00.0",
        "-device vfio-pci,host=02:00.0",
    ];
    let on = |linux: &str, line: &str| {
        let machine = Machine::new(linux);
        machine.limit("self", "unlimited", "0");
        machine.device("0000:01:00.0", RESOURCE, "", 0);
        machine.report(&qemu(&format!("qemu -m 4G {line}")))
    };
    let slow = on("6.14.9-arch1\n", &two.join(" "));
    assert_eq!(causes(&slow), [("start.bar-mapping", false)]);
    assert_eq!(slow.findings[0].devices, ["0000:01:00.0"]);
    assert!(
        slow.findings[0].text.contains("33,554,432 pages of 4 KiB"),
        "{slow:?}"
    );
    assert_eq!(
        slow.bars.iter().map(|bar| bar.bytes).collect::<Vec<_>>(),
        [128 * GIB]
    );
    assert_eq!(causes(&on("6.15.0\n", &two.join(" "))), []);
    let iommufd = two.map(|device| format!("{device},iommufd=i"));
    let line = format!("-object iommufd,id=i {}", iommufd.join(" "));
    assert_eq!(causes(&on("6.18.3\n", &line)), [("start.bar-peer", false)]);
    assert_eq!(causes(&on("6.19.0\n", &line)), []);
    let alone = format!("-object iommufd,id=i {}", iommufd[0]);
    assert_eq!(causes(&on("6.18.3\n", &alone)), []);
}

#[test]
fn a_control_group_may_leave_less_than_the_guest_has() {
    let machine = Machine::new("6.18.0\n");
    machine.limit("self", "unlimited", "0");
    machine
        .file("proc/self/cgroup", "0::/vm\n")
        .file(
            "proc/self/mountinfo",
            "30 24 0:26 / /group rw - cgroup2 cgroup2 rw\n",
        )
        .file("group/vm/memory.max", "2147483648\n")
        .file("group/vm/memory.current", "1048576\n")
        .file("group/vm/memory.stat", "inactive_file 0\nactive_file 0\n")
        .file("group/vm/hugetlb.2MB.max", "4194304\n")
        .file("group/vm/hugetlb.2MB.current", "0\n");
    let device = "-device vfio-pci,host=01:00.0";
    let found = |line: &str| causes(&machine.report(&qemu(line))).first().copied();
    assert_eq!(
        found(&format!("qemu -m 4G {device}")),
        Some(("pages.over-group", false))
    );
    // It comes as the guest uses it.
    assert_eq!(found("qemu -m 4G"), Some(("pages.over-group", true)));
    assert_eq!(found(&format!("qemu -m 1G {device}")), None);
    let pool = "qemu -M q35,memory-backend=a -object memory-backend-memfd,id=a,hugetlb=on,size=";
    machine.pool(2048, 0, 0, &[100]);
    assert_eq!(found(&format!("{pool}4M")), None);
    assert_eq!(
        found(&format!("{pool}6M")),
        Some(("pages.over-group", false))
    );
}

#[test]
fn a_process_has_its_own_pages_and_its_own_limit() {
    let machine = Machine::new("6.18.0\n");
    machine.limit("7", "1048576", "0");
    machine.pool(2048, 0, 0, &[0]);
    let process = |present_bytes, guest: Option<Guest>, nodes: &[(Option<u32>, u64)]| {
        let process = ProcessReport {
            pid: 7,
            present_bytes,
            guest,
            nodes: nodes.into(),
            ..ProcessReport::default()
        };
        NeedsReport::of_process(&process, &machine.path(""))
    };
    let report = process(8 * MIB, None, &[]);
    assert_eq!(causes(&report), [("memlock.too-low", false)]);
    assert_eq!(
        report.advice()[0].setting[0],
        "prlimit --memlock=8388608:8388608 --pid 7"
    );
    assert_eq!(causes(&process(MIB, None, &[])), []);
    // All memory of a virtual machine counts, and its pages are there.
    let guest =
        qemu("qemu -M q35,memory-backend=a -object memory-backend-memfd,id=a,hugetlb=on,size=4G");
    let report = process(MIB, Some(guest), &[]);
    assert_eq!(causes(&report), [("memlock.too-low", false)]);
    assert!(report.pools.is_empty());
    // Unknown nodes are none.
    let two = [(Some(0), MIB), (Some(1), MIB), (Some(2), 0), (None, MIB)];
    assert_eq!(
        causes(&process(MIB, None, &two)),
        [("config.memory-spread", false)]
    );
    assert_eq!(causes(&process(MIB, None, &two[2..])), []);
    machine.limit("7", "1048576", "4000");
    assert_eq!(causes(&process(8 * MIB, None, &[])), []);
}

#[test]
fn files_that_are_damaged_or_missing_are_not_known() {
    let machine = Machine(Files::new());
    let guest = qemu("qemu -m 4G -mem-path /dev/hugepages -device vfio-pci,host=01:00.0");
    machine
        .file(
            "sys/kernel/mm/hugepages/hugepages-99999999999999999999kB/free_hugepages",
            "1\n",
        )
        .file(
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
            "-1\n",
        )
        .file("proc/self/limits", "Max locked memory\n")
        .file("proc/sys/kernel/osrelease", "six\n");
    machine.device(
        "0000:01:00.0",
        "0x1 0x0 0x200\nx\n",
        "0x2 0x1 msi\n0x0\n",
        u64::MAX,
    );
    let report = machine.report(&guest);
    assert_eq!(causes(&report), []);
    assert_eq!(report.locked.unwrap().limit_of, None);
    // The widest unit that the register can name.
    assert_eq!(report.last_address, Some((1 << 57) - 1));
    assert!(report.bars.is_empty() && report.reserved_ranges == 0);
}

#[test]
fn numbers_at_borders_end_in_a_report() {
    let available = Available {
        pools: vec![CountedPool {
            node: Some(0),
            page_bytes: 2 * MIB,
            free: u64::MAX,
            growth: u64::MAX,
        }],
        lock: Some(LockLimit {
            bytes: Some(0),
            lifted: false,
            of: LockOwner::Given,
        }),
        reserved: vec![ReservedRange::new("reserved", 0..=u64::MAX)],
        last: Some(0),
        bars: vec![("0000:01:00.0".into(), u64::MAX)],
        linux: Some((0, 0)),
        ..Available::default()
    };
    for bytes in [0, 1, MIB, 1 << 56, u64::MAX] {
        let ram = Ram {
            bytes,
            pool_bytes: Some(2 * MIB),
            bound: true,
            host_nodes: vec![0, 0],
            ..Ram::default()
        };
        let mut guest = qemu("qemu -M q35 -m 4G -device vfio-pci,host=01:00.0 -device intel-iommu");
        guest.memory = vec![ram.clone(), ram];
        guest.remapped = guest
            .remapped
            .map(|low| crate::inspect::Remapped { bytes, ..low });
        for monitor in [Monitor::Qemu, Monitor::Libvirt, Monitor::Other] {
            guest.monitor = monitor;
            let report = NeedsReport::with(&guest, &available);
            assert!(serde_json::to_string(&report).is_ok());
        }
    }
}
