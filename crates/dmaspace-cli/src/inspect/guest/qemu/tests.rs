//! Tests of [`super`].

use proptest::prelude::*;

use super::super::Interface;
use super::super::tests::{NUMBERS, predict};
use super::value::address;
use super::*;

const POOL: u64 = 2 << 20;

const LIBVIRT: &str = r#"/usr/bin/qemu-system-x86_64 -name guest=web,debug-threads=on -S
        -object '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/x"}'
        -machine pc-q35-10.0,memory-backend=pc.ram -m size=4194304k
        -object '{"qom-type":"memory-backend-memfd","id":"pc.ram","hugetlb":true,
                  "hugetlbsize":2097152,"prealloc":true,"prealloc-threads":2,"size":4294967296}'
        -device '{"driver":"vfio-pci","host":"0000:01:00.0","id":"hostdev0","bus":"pci.5"}'"#;

fn parsed(line: &str) -> Guest {
    qemu_line(line, POOL).unwrap()
}

#[test]
fn a_machine_of_10_1_is_of_a_qemu_that_maps_by_file() {
    for (machine, by_file) in [
        ("q35", false),
        ("pc-q35-10.0", false),
        ("pc-q35-10.1", true),
        ("virt-11.0", true),
        ("pc-q35-rhel9.6.0", false),
    ] {
        let guest = qemu_line(&format!("qemu -machine {machine}"), 2 << 20).unwrap();
        assert_eq!(guest.by_file, by_file, "{machine}");
    }
}

#[test]
fn memory_is_what_m_says_or_the_objects_that_are_used() {
    for (line, bytes) in [
        ("qemu-system-x86_64", 128 << 20),
        ("qemu-system-x86_64 -m 4096", 4 << 30),
        ("qemu-system-x86_64 -m 4G,slots=2,maxmem=8G", 4 << 30),
        ("qemu-system-x86_64 --m size=512M", 512 << 20),
        (
            "LC_ALL=C /usr/bin/kvm -append '-m 1' -m 1G disk.img",
            1 << 30,
        ),
        ("qemu -append -m -m 1G", 1 << 30),
    ] {
        let ram = Ram {
            bytes,
            asks_for_huge: Some(true),
            ..Ram::default()
        };
        assert_eq!(parsed(line).memory, [ram], "{line}");
    }
    let guest = parsed(
        "qemu -m 3G -object memory-backend-memfd,id=a,size=1G,hugetlb=on,hugetlbsize=1G \
         -object memory-backend-ram,id=b,size=2G,prealloc=on,prealloc-threads=4,host-nodes=0 \
         -object memory-backend-file,id=c,size=1G,mem-path=/dev/hugepages/a,,b,share=on,x=1 \
         -object memory-backend-shm,id=d,size=1G -object rng-random,id=rng \
         -numa node,memdev=a -numa node,memdev=b -device pc-dimm,memdev=c",
    );
    let expected = [
        Ram {
            id: "a".into(),
            bytes: 1 << 30,
            pool_bytes: Some(1 << 30),
            shared: true,
            ..Ram::default()
        },
        Ram {
            id: "b".into(),
            bytes: 2 << 30,
            prealloc_threads: 4,
            threads_given: true,
            host_nodes: vec![0],
            ..Ram::default()
        },
        Ram {
            id: "c".into(),
            bytes: 1 << 30,
            shared: true,
            file: Some("/dev/hugepages/a,b".into()),
            properties: vec![("x".into(), "1".into())],
            ..Ram::default()
        },
    ];
    let expected = expected.map(|ram| Ram {
        asks_for_huge: Some(true),
        ..ram
    });
    assert_eq!(guest.memory, expected);
    assert_eq!(guest.ignored, ["x of \"c\"", "memory object \"d\""]);
    assert_eq!(guest.bytes(), 4 << 30);
}

#[test]
fn older_options_bring_all_memory_in() {
    let guest = parsed("qemu -m 1G -smp 4,cores=4 -mem-path /dev/hugepages -mem-prealloc");
    let [ram] = &guest.memory[..] else {
        panic!("{guest:?}");
    };
    assert_eq!(ram.file.as_deref(), Some("/dev/hugepages"));
    assert_eq!(ram.prealloc_threads, 4);
    // So does one that names no threads, wherever `-smp` is.
    let object = "-object memory-backend-ram,id=a,size=1G,prealloc=on -numa node,memdev=a";
    let guest = parsed(&format!("qemu {object} -smp 4"));
    assert_eq!(guest.memory[0].prealloc_threads, 4);
}

#[test]
fn devices_are_given_by_type_1_unless_all_have_iommufd() {
    let both = "-device vfio-pci,host=01:00.0,iommufd=iommufd0 -device vfio-pci,host=0001:02:00.1";
    let guest = parsed(&format!("qemu {both}"));
    let devices = ["0000:01:00.0", "0001:02:00.1"].map(|host| host.to_owned().into());
    assert_eq!(guest.devices, devices);
    assert_eq!(guest.interface, Some(Interface::Type1));
    let guest = parsed("qemu -device vfio-pci,host=01:00.0,iommufd=iommufd0");
    assert_eq!(guest.interface, Some(Interface::Iommufd));
    assert_eq!(parsed("qemu -device virtio-net-pci").interface, None);
}

#[test]
fn memory_below_4_gib_of_a_pc_is_mapped_several_times() {
    const GIB: u64 = 1 << 30;
    let flash = "-drive if=pflash,file=/x";
    for (line, expected) in [
        ("-m 1G", Some((GIB, 5))),
        ("-m 8G", Some((3 * GIB, 5))),
        ("-m 3G -machine pc-i440fx-10.0", Some((3 * GIB, 5))),
        ("-m 8G -M pc,max-ram-below-4g=1G", Some((GIB, 5))),
        ("-m 8G -machine q35", Some((2 * GIB, 5))),
        ("-m 2560M -machine pc-q35-10.0", Some((2560 << 20, 5))),
        ("-m 2816M -machine q35", Some((2 * GIB, 5))),
        (
            "-m 8G -machine q35,pflash0=code -machine memory-backend=a -object memory-backend-ram,id=a",
            Some((2 * GIB, 2)),
        ),
        (&format!("-m 8G -machine q35 {flash}"), Some((2 * GIB, 2))),
        ("-m 8G -machine virt", None),
        ("-m 8G -machine microvm", None),
    ] {
        let found = parsed(&format!("qemu {line}")).remapped;
        let found = found.map(|low| (low.bytes, low.times));
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn options_of_other_versions_decide_nothing() {
    let guest = parsed(
        "kvm -id 7 -parameter -redir tcp:3389::3389 -no-kvm -usbdevice mouse -tdf -localtime -m 512 -startdate now \
         -std-vga -newest value -m 1G disk.raw",
    );
    assert_eq!(guest.bytes(), 1 << 30);
    assert_eq!(guest.ignored, ["-parameter", "-newest value"]);
    let running = ["qemu", "-m", "1G", "-newest-mem", "1"].map(str::to_owned);
    let guest = qemu_rough(&running, POOL);
    assert_eq!(guest.ignored, ["-newest-mem is not an option of QEMU"]);
}

#[test]
fn settings_elsewhere_are_named() {
    for (line, bytes, ignored) in [
        (
            "-readconfig a.cfg -set device.hostdev0.x-vga=on",
            128 << 20,
            &[
                "-readconfig a.cfg, which is not read",
                "-set device.hostdev0.x-vga=on",
            ][..],
        ),
        (
            "-readconfig a.cfg -m 1G -machine q35,memory-backend=mem0",
            1 << 30,
            &[
                "-readconfig a.cfg, which is not read",
                "memory object \"mem0\", which may be in that file",
            ],
        ),
        (
            "-m 1G $MORE -device ${CARD} -object ${OBJECT} disk.img ... | tee log",
            1 << 30,
            &[
                "$MORE in the place of options",
                "${CARD}",
                "-object ${OBJECT}",
                "... in the place of options",
            ],
        ),
        (
            "-m 1G -overcommit mem-lock=on -realtime mlock=off",
            1 << 30,
            &["-overcommit mem-lock=on"],
        ),
    ] {
        let guest = parsed(&format!("qemu {line}"));
        assert_eq!(guest.bytes(), bytes, "{line}");
        assert_eq!(guest.ignored, ignored, "{line}");
    }
}

#[test]
fn programs_before_qemu_are_named() {
    for (line, ignored) in [
        ("$ qemu-system-x86_64 -m 1G", &[][..]),
        ("# A=1 /usr/libexec/qemu-kvm -m 1G", &[]),
        ("qemu-lite-system-x86_64 -m 1G", &[]),
        ("2024-01-01 1:00: it's up\nA=1 \\\n/bin/kvm -m 1G", &[]),
        (
            "sudo -u qemu taskset -c 0-3 ./qemu-system-aarch64 -m 1G",
            &["sudo -u qemu taskset -c 0-3 before QEMU"],
        ),
        ("${QEMU} -m 1G \\\r\n -smp 2 \\\n", &[]),
        ("A=1 numactl -m 0 kvm -m 1G", &["numactl -m 0 before QEMU"]),
    ] {
        let guest = parsed(line);
        assert_eq!(guest.bytes(), 1 << 30, "{line}");
        assert_eq!(guest.ignored, ignored, "{line}");
    }
}

#[test]
fn sizes_are_as_qemu_reads_them() {
    for (size, bytes) in [
        ("1.5G", 3 << 29),
        ("0.5g", 512 << 20),
        ("1048576k", 1 << 30),
        ("4097b", 8192),
        ("size=1024,slots=2,maxmem=1T", 1 << 30),
        ("0", 128 << 20),
        ("1P", 1 << 50),
    ] {
        assert_eq!(parsed(&format!("qemu -m {size}")).bytes(), bytes, "{size}");
    }
    let object = "qemu -object memory-backend-ram,id=a,size=0x40000000 -machine memory-backend=a";
    assert_eq!(parsed(object).bytes(), 1 << 30);
    let machine = "qemu -machine q35,memory.size=2G,smp.cpus=3";
    let guest = parsed(machine);
    assert_eq!((guest.bytes(), guest.cpus), (2 << 30, 3));
    let json = r#"qemu -machine '{"type":"q35","memory":{"size":"2G"},"smp":{"cpus":3}}'"#;
    let guest = parsed(json);
    assert_eq!((guest.bytes(), guest.cpus), (2 << 30, 3));
    for (smp, cpus) in [
        ("sockets=2,cores=4,threads=2", 16),
        ("maxcpus=6", 6),
        ("2,cores=4", 2),
    ] {
        assert_eq!(parsed(&format!("qemu -smp {smp}")).cpus, cpus, "{smp}");
    }
    for none in [
        "1..5G",
        ".5G",
        "1.5X",
        "1.G5",
        "99999999999E",
        "0x",
        "1.0000000000000000001G",
    ] {
        qemu_line(&format!("qemu -m {none}"), POOL).unwrap_err();
    }
}

#[test]
fn devices_without_an_address_are_named() {
    for (device, interface, address, ignored) in [
        (
            "-device vfio-pci,sysfsdev=/sys/bus/pci/devices/0000:03:00.0/",
            Some(Interface::Type1),
            Some("0000:03:00.0"),
            None,
        ),
        (
            "-device vfio-pci,id=gpu,sysfsdev=/sys/bus/mdev/devices/a-b",
            Some(Interface::Type1),
            None,
            Some("vfio-pci gpu: mediated device a-b, which pins on demand"),
        ),
        (
            r#"-device '{"driver":"vfio-pci","fd":"9","id":"nic","iommufd":"i"}'"#,
            Some(Interface::Iommufd),
            None,
            Some("vfio-pci nic: a device by fd=9"),
        ),
        (
            "-device vfio-pci",
            Some(Interface::Type1),
            None,
            Some("vfio-pci: no device is named"),
        ),
        (
            "-device pci-assign,host=04:00.0",
            None,
            None,
            Some("pci-assign 04:00.0, by KVM and not by VFIO"),
        ),
        (
            "-pcidevice host=04:00.0",
            None,
            None,
            Some("-pcidevice host=04:00.0, by KVM and not by VFIO"),
        ),
        (
            "-drive file=nvme://0000:44:00.0/1,if=none",
            Some(Interface::Type1),
            Some("0000:44:00.0"),
            None,
        ),
        (
            r#"-blockdev '{"driver":"raw","file":{"driver":"nvme","device":"45:00.0"}}'"#,
            Some(Interface::Type1),
            Some("0000:45:00.0"),
            None,
        ),
        (
            "-blockdev '{'",
            None,
            None,
            Some(
                "-blockdev: the value is damaged JSON: EOF while parsing an object at line 1 column 1",
            ),
        ),
        (
            "-netdev vhost-vdpa,vhostdev=/dev/vhost-vdpa-0,id=n",
            None,
            None,
            Some("-netdev vhost-vdpa"),
        ),
        (
            "-netdev type=vhost-user,id=n",
            None,
            None,
            Some("-netdev vhost-user"),
        ),
        (
            "-device vhost-user-fs-pci,tag=a",
            None,
            None,
            Some("vhost-user-fs-pci"),
        ),
        (
            "-device vfio-user-pci,socket=a",
            None,
            None,
            Some("vfio-user-pci"),
        ),
        (
            "-device cxl-type3,volatile-memdev=a",
            None,
            None,
            Some("cxl-type3"),
        ),
    ] {
        let guest = parsed(&format!("qemu {device}"));
        let addresses = guest.devices.iter().map(|device| device.address.as_str());
        assert_eq!(guest.interface, interface, "{device}");
        assert_eq!(
            addresses.collect::<Vec<_>>(),
            Vec::from_iter(address),
            "{device}"
        );
        assert_eq!(guest.ignored, Vec::from_iter(ignored), "{device}");
    }
}

#[test]
fn a_virtual_iommu_is_named() {
    for (line, model) in [
        ("-device intel-iommu,intremap=on", Some("intel-iommu")),
        ("-device virtio-iommu-pci", Some("virtio-iommu-pci")),
        ("-machine virt,iommu=smmuv3", Some("smmuv3")),
        ("-machine q35,iommu=on", Some("intel-iommu")),
        ("-machine virt,iommu=none", None),
    ] {
        assert_eq!(
            parsed(&format!("qemu {line}")).viommu.as_deref(),
            model,
            "{line}"
        );
    }
}

#[test]
fn a_guest_is_confidential_by_the_object_that_its_machine_names() {
    for (line, kind, ignored) in [
        (
            "-machine q35,confidential-guest-support=t -object tdx-guest,id=t",
            Some("TDX"),
            None,
        ),
        (
            "-machine q35,memory-encryption=s -object sev-guest,id=s,policy=0x1",
            Some("SEV"),
            None,
        ),
        (
            "-object sev-guest,id=s,policy=5 -machine q35,confidential-guest-support=s",
            Some("SEV-ES"),
            None,
        ),
        ("-machine q35,confidential-guest-support=s", Some("s"), None),
        (
            "-object sev-snp-guest,id=s",
            None,
            Some("object \"s\" (SEV-SNP)"),
        ),
    ] {
        let guest = parsed(&format!("qemu {line}"));
        assert_eq!(guest.confidential.as_deref(), kind, "{line}");
        assert_eq!(guest.ignored, Vec::from_iter(ignored), "{line}");
    }
    let private = parsed(
        "qemu -machine q35,confidential-guest-support=s,memory-backend=m -object sev-snp-guest,id=s \
         -object memory-backend-memfd-private,id=m,size=1G",
    );
    assert!(private.keeps_private_memory());
    assert_eq!(private.bytes(), 1 << 30);
}

#[test]
fn an_address_is_as_the_host_lists_it() {
    for (text, found) in [
        ("01:00.0", Some("0000:01:00.0")),
        ("1:A.7", Some("0000:01:0a.7")),
        ("10000:ff:1f.7", Some("10000:ff:1f.7")),
        ("100:00.0", None),
        ("01:00.8", None),
        ("01:00", None),
        ("00.0", None),
        ("1:2:3:4.0", None),
        ("+1:00.0", None),
        (":00.0", None),
    ] {
        assert_eq!(address(text).as_deref(), found, "{text}");
    }
}

#[test]
fn libvirt_is_known_by_what_it_adds() {
    let guest = parsed(LIBVIRT);
    assert_eq!(guest.monitor, Monitor::Libvirt);
    assert_eq!(guest.name.as_deref(), Some("web"));
    let ram = Ram {
        id: "pc.ram".into(),
        bytes: 4 << 30,
        pool_bytes: Some(2 << 20),
        shared: true,
        file: None,
        asks_for_huge: Some(true),
        prealloc_threads: 2,
        threads_given: true,
        ..Ram::default()
    };
    assert_eq!(guest.memory, [ram]);
    assert_eq!(guest.interface, Some(Interface::Type1));
    assert_eq!(guest.ignored, [] as [&str; 0]);
    assert_eq!(parsed("qemu -S -name web").monitor, Monitor::Qemu);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Any text, and a good one with some bytes changed, is understood or refused.
    #[test]
    fn no_text_is_a_panic(
        any in any::<String>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 1..6),
    ) {
        let _ = qemu_line(&any, POOL);
        let mut good = LIBVIRT.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(good.len());
            good[at] = byte;
        }
        if let Ok(guest) = qemu_line(&String::from_utf8(good).unwrap(), POOL) {
            prop_assert_eq!(guest.memory.len(), 1);
            predict(&guest);
        }
    }

    /// Each number is one of a machine, or refused.
    #[test]
    fn no_number_is_a_panic(
        numbers in prop::collection::vec(prop_oneof![prop::sample::select(&NUMBERS[..]), any::<u64>()], 9),
        unit in prop::sample::select(vec!["", "K", "M", "G", "T"]),
    ) {
        let [memory, below, cpus, size, page, threads, bus, slot, function] = numbers[..] else { unreachable!() };
        let line = format!("qemu -m {memory}{unit} -machine q35,max-ram-below-4g={below}{unit} -smp {cpus} \
            -object memory-backend-memfd,id=a,size={size}{unit},hugetlb=on,hugetlbsize={page}{unit},\
            prealloc=on,prealloc-threads={threads} -numa node,memdev=a \
            -device vfio-pci,host={bus:x}:{slot:x}.{function:x}");
        match qemu_line(&line, POOL) {
            Ok(guest) => predict(&guest),
            Err(error) => prop_assert!(error.to_string().contains(|c: char| c.is_ascii_digit())),
        }
    }
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    for (line, said) in [
        (
            "qemu 'a",
            "the command line has a quote that does not close",
        ),
        (
            "/bin/foo -m 4G",
            "\"foo\" is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm",
        ),
        ("qemu -m 4G -ram 1G", "-ram is not an option of QEMU"),
        ("qemu -m 4G --vfio", "-vfio is not an option of QEMU"),
        (
            "qemu \u{2013}m 4G",
            "\"\u{2013}m\" begins with a dash that is no hyphen; an option begins with -",
        ),
        (
            "qemu -drive file=nvme://disk/1",
            "-drive: \"disk\" is no PCI address like 0000:01:00.0",
        ),
        (
            "sudo -i",
            "\"sudo\" is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm",
        ),
        ("qemu -m ${MEMORY}", "-m: \"${MEMORY}\" is no size"),
        ("qemu -m", "-m needs a value"),
        ("qemu -m 4X", "-m: \"4X\" is no size"),
        (
            "qemu -object memory-backend-disk,id=a",
            "-object: \"memory-backend-disk\" is not known; known are memory-backend-ram, \
             memory-backend-memfd, memory-backend-file, memory-backend-shm, memory-backend-memfd-private, memory-backend-guest-memfd",
        ),
        (
            "qemu -object memory-backend-ram,share=maybe",
            "-object memory-backend-ram, share: \"maybe\" is not known; known are on, off",
        ),
        (
            "qemu -object memory-backend-ram,prealloc-threads=-1",
            "-object memory-backend-ram, prealloc-threads: \"-1\" is no number from 1 to 65536",
        ),
        (
            "qemu -object memory-backend-ram,prealloc-threads=4294967295",
            "-object memory-backend-ram, prealloc-threads: \"4294967295\" is no number from 1 to 65536",
        ),
        (
            "qemu -object memory-backend-memfd,hugetlb=on,hugetlbsize=12K",
            "-object memory-backend-memfd, hugetlbsize: 12 KiB is no size of pages, which have a power of \
             two from 4 KiB to 16 GiB",
        ),
        ("qemu -m 65537T", "-m: 64.0 PiB is more than 64 PiB"),
        (
            "qemu -object memory-backend-ram,size=65536T,id=a -object memory-backend-ram,size=4K,id=b \
             -numa node,memdev=a -numa node,memdev=b",
            "all memory: 64.0 PiB is more than 64 PiB",
        ),
        (
            "qemu -machine q35,max-ram-below-4g=5G",
            "-machine max-ram-below-4g: 5 GiB is more than 4 GiB",
        ),
        (
            "qemu -smp 0",
            "-smp cpus: \"0\" is no number from 1 to 65536",
        ),
        (
            "qemu -smp many",
            "-smp cpus: \"many\" is no number from 1 to 65536",
        ),
        (
            "qemu -device vfio-pci,host=01:20.0",
            "-device vfio-pci, host: \"01:20.0\" is no PCI address like 0000:01:00.0",
        ),
        (
            "qemu -object '{\"a\"'",
            "-object: the value is damaged JSON",
        ),
        (
            "qemu -machine q35,memory-backend=ram",
            "memory object \"ram\" is used, and no -object defines it",
        ),
    ] {
        let error = qemu_line(line, POOL).unwrap_err();
        assert_eq!(error.to_string(), said, "{line}");
    }
}

#[test]
fn a_machine_has_the_memory_that_its_board_has() {
    for (line, mib) in [
        ("qemu-system-x86_64", 128),
        ("qemu-system-x86_64 -M none", 0),
        ("qemu-system-ppc64", 512),
        ("qemu-system-ppc64 -M pseries-9.0", 512),
        ("qemu-system-ppc64 -M powernv10", 1024),
        ("qemu-system-aarch64 -M virt", 128),
        ("qemu-system-aarch64 -M sbsa-ref", 1024),
        ("qemu-system-aarch64 -M raspi4b", 2048),
        ("qemu-system-loongarch64", 1024),
    ] {
        assert_eq!(parsed(line).bytes(), mib << 20, "{line}");
    }
}

#[test]
fn nodes_of_the_host_and_properties_are_kept() {
    let guest = parsed(
        "qemu -object memory-backend-ram,id=a,size=1G,host-nodes=0-1,host-nodes=3,policy=bind,reserve=off \
         -object '{\"qom-type\":\"memory-backend-ram\",\"id\":\"b\",\"size\":1073741824,\"host-nodes\":[2],\"policy\":\"preferred\"}' \
         -numa node,memdev=a -numa node,memdev=b",
    );
    let nodes = guest
        .memory
        .iter()
        .map(|ram| (ram.host_nodes.clone(), ram.bound));
    let nodes: Vec<_> = nodes.collect();
    assert_eq!(nodes, [(vec![0, 1, 3], true), (vec![2], false)]);
    let kept = |ram: &Ram| {
        let names = ram
            .properties
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        names.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(kept(&guest.memory[0]), "policy=bind reserve=off");
    assert_eq!(guest.nodes, 2);
}

#[test]
fn a_size_that_nodes_do_not_have_is_named() {
    let line = "qemu -m 2G -object memory-backend-ram,id=a,size=3G -numa node,memdev=a";
    let guest = parsed(line);
    assert_eq!(guest.bytes(), 3 << 30);
    let said = "-m 2 GiB, which is not the 3 GiB of the nodes: QEMU refuses that";
    assert_eq!(guest.ignored, [said]);
    assert!(parsed(&line.replace("2G", "3G")).ignored.is_empty());
}

#[test]
fn an_object_says_more_than_mem_prealloc() {
    let object = "-machine memory-backend=a -object memory-backend-ram,id=a,size=1G";
    for (prealloc, threads) in [("", 2), (",prealloc=on", 2), (",prealloc=off", 0)] {
        let guest = parsed(&format!("qemu -smp 2 -mem-prealloc {object}{prealloc}"));
        assert_eq!(guest.memory[0].prealloc_threads, threads, "{prealloc}");
    }
}

#[test]
fn a_file_of_options_is_read_where_it_is() {
    let path = std::env::temp_dir().join(format!("dmaspace-readconfig-{}", std::process::id()));
    std::fs::write(
        &path,
        "[memory]\n  size = \"3G\"\n[device \"gpu\"]\n  driver = \"vfio-pci\"\n  host = \"0000:01:00.0\"\n",
    )
    .unwrap();
    let guest = parsed(&format!("qemu -readconfig {}", path.display()));
    std::fs::remove_file(&path).unwrap();
    assert_eq!((guest.bytes(), guest.devices.len()), (3 << 30, 1));
    assert!(guest.ignored.is_empty() && guest.unread.is_empty());
}

#[test]
fn variables_that_may_hold_the_memory_are_refused() {
    let error = |line: &str| qemu_line(line, POOL).unwrap_err().to_string();
    let said = "the line says nothing of memory, and ${args[@]} stands for options that may";
    assert_eq!(
        error("args=(-m 8G)\nqemu-system-x86_64 \"${args[@]}\""),
        said
    );
    let known = parsed("M=8G\nqemu-system-x86_64 -m $M $MORE");
    assert_eq!(known.bytes(), 8 << 30);
    assert_eq!(known.ignored, ["$MORE in the place of options"]);
}
