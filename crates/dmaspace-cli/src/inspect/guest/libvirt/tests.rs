//! Tests of [`super`].

use proptest::prelude::*;

use super::super::tests::{NUMBERS, predict};
use super::super::{Interface, Monitor, Remapped};
use super::*;

const POOL: u64 = 2 << 20;

const MACHINE: &str = "<domain><memory>9437184</memory>
        <memoryBacking><hugepages>
          <page size='2' unit='MiB'/><page size='1' unit='GiB' nodeset='1-3,^2'/>
        </hugepages></memoryBacking>
        <cpu><numa>
          <cell id='0' cpus='0' memory='4194304' unit='KiB'/>
          <cell id='1' cpus='1' memory='4' unit='GiB' memAccess='shared'/>
          <cell id='2' cpus='2' memory='0'/>
        </numa></cpu>
        <devices>
          <memory model='dimm'><target><size unit='GiB'>1</size><node>0</node></target></memory>
          <memory model='virtio-mem'><target><size unit='GiB'>8</size></target></memory>
        </devices></domain>";

fn parsed(inner: &str) -> Guest {
    libvirt(&format!("<domain type='kvm'>{inner}</domain>"), POOL).unwrap()
}

#[test]
fn memory_is_backed_as_memory_backing_says() {
    let plain = Ram {
        bytes: 4 << 30,
        asks_for_huge: Some(true),
        ..Ram::default()
    };
    for (backing, ram) in [
        ("", plain.clone()),
        (
            "<hugepages/>",
            Ram {
                pool_bytes: Some(2 << 20),
                prealloc_threads: 6,
                ..plain.clone()
            },
        ),
        (
            "<hugepages><page size='1' unit='G' nodeset='0'/></hugepages>",
            Ram {
                pool_bytes: Some(1 << 30),
                prealloc_threads: 6,
                ..plain.clone()
            },
        ),
        (
            "<source type='memfd'/><allocation mode='immediate' threads='8'/>",
            Ram {
                shared: true,
                prealloc_threads: 8,
                threads_given: true,
                ..plain.clone()
            },
        ),
        (
            "<source type='file'/><access mode='shared'/><allocation mode='ondemand'/>",
            Ram {
                shared: true,
                file: Some("/var/lib/libvirt/qemu/ram".into()),
                ..plain.clone()
            },
        ),
    ] {
        let guest = parsed(&format!(
            "<name>web</name><memory unit='GiB'>4</memory><vcpu>6</vcpu>\
             <memoryBacking>{backing}</memoryBacking>"
        ));
        assert_eq!(guest.memory, [ram], "{backing}");
        let known = (guest.name.as_deref(), guest.monitor);
        assert_eq!(known, (Some("web"), Monitor::Libvirt));
    }
}

#[test]
fn cells_have_pages_of_their_own_and_modules_are_added() {
    let guest = libvirt(MACHINE, POOL).unwrap();
    let found = guest
        .memory
        .iter()
        .map(|ram| (ram.bytes, ram.pool_bytes, ram.shared));
    let found: Vec<_> = found.collect();
    let (small, giant) = (Some(2 << 20), Some(1 << 30));
    let expected = [
        (4 << 30, small, false),
        (4 << 30, giant, true),
        (1 << 30, small, false),
    ];
    assert_eq!(found, expected);
    assert_eq!(guest.ignored, ["<memory> virtio-mem"]);
}

#[test]
fn memory_below_4_gib_of_a_pc_is_mapped_several_times() {
    let memory = "<memory unit='GiB'>8</memory>";
    let kind = |name: &str| format!("<type machine='{name}'>hvm</type>");
    let (q35, flash) = (kind("pc-q35-10.0"), "<loader type='pflash'>/x</loader>");
    for (os, expected) in [
        (format!("<os>{q35}</os>"), Some(5)),
        (format!("<os firmware='efi'>{q35}</os>"), Some(2)),
        (format!("<os>{q35}{flash}</os>"), Some(2)),
        (format!("<os>{}</os>", kind("virt-10.0")), None),
        (String::new(), None),
    ] {
        let found = parsed(&format!("{memory}{os}")).remapped;
        let expected = expected.map(|times| Remapped {
            bytes: 2 << 30,
            times,
        });
        assert_eq!(found, expected, "{os}");
    }
}

#[test]
fn devices_are_given_by_type_1_unless_all_have_iommufd() {
    let device = |driver: &str| {
        format!(
            "<hostdev mode='subsystem' type='pci' managed='yes'>{driver}<source>\
             <address domain='0x0000' bus='0x1' slot='0x00' function='0x1'/></source></hostdev>"
        )
    };
    let by = |devices: &str| {
        let guest = parsed(&format!(
            "<memory>4096</memory><devices>{devices}</devices>"
        ));
        (guest.devices, guest.interface)
    };
    let iommufd = device("<driver name='vfio' iommufd='yes'/>");
    let one = || vec!["0000:01:00.1".to_owned().into()];
    assert_eq!(by(&iommufd), (one(), Some(Interface::Iommufd)));
    let (both, interface) = by(&(device("") + &iommufd));
    assert_eq!((both.len(), interface), (2, Some(Interface::Type1)));
    assert_eq!(by("<hostdev type='usb'/>"), (vec![], None));
}

#[test]
fn interfaces_and_disks_are_devices_too() {
    let address = |bus| format!("<source><address type='pci' bus='{bus}'/></source>");
    let place = "<address type='pci' bus='0x09' slot='0x04'/>";
    for (devices, addresses, interface, ignored) in [
        (
            format!(
                "<interface type='hostdev' managed='yes'>{}{place}</interface>",
                address(4)
            ),
            &["0000:04:00.0"][..],
            Some(Interface::Type1),
            &[][..],
        ),
        (
            format!("<interface type='bridge'>{place}</interface><disk type='file'>{place}</disk>"),
            &[],
            None,
            &[],
        ),
        // Elements are in any order.
        (
            format!(
                "<interface type='hostdev'>{}<driver iommufd='yes'/></interface>",
                address(4)
            ),
            &["0000:04:00.0"],
            Some(Interface::Iommufd),
            &[],
        ),
        (
            format!("<disk type='nvme'>{}</disk>", address(5)),
            &["0000:05:00.0"],
            Some(Interface::Type1),
            &[],
        ),
        (
            "<hostdev type='mdev' model='vfio-ap'><source><address uuid='a-b'/></source></hostdev>"
                .into(),
            &[],
            Some(Interface::Type1),
            &["mediated device a-b of vfio-ap, which pins on demand"],
        ),
        (
            "<hostdev type='pci'><source/></hostdev>".into(),
            &[],
            Some(Interface::Type1),
            &["/domain/devices/hostdev without an address"],
        ),
        (
            "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>\
             <interface type='vhostuser'/><filesystem><driver type='virtiofs'/></filesystem>"
                .into(),
            &[],
            None,
            &[
                "<interface> vdpa",
                "<interface> vhostuser",
                "<filesystem> virtiofs",
            ],
        ),
    ] {
        let guest = parsed(&format!(
            "<memory>4096</memory><devices>{devices}</devices>"
        ));
        let found = guest.devices.iter().map(|device| device.address.as_str());
        assert_eq!(found.collect::<Vec<_>>(), addresses, "{devices}");
        assert_eq!(guest.interface, interface, "{devices}");
        assert_eq!(guest.ignored, ignored, "{devices}");
    }
    let domain = "<memory>4096</memory><devices><hostdev type='pci'><source><address bus='1'/></source>\
        </hostdev></devices><iommufd enabled='yes'/>";
    assert_eq!(parsed(domain).interface, Some(Interface::Iommufd));
}

#[test]
fn modules_have_pages_of_their_own_and_are_a_part_of_all_memory() {
    let module = |source: &str| {
        format!(
            "<memory model='dimm' access='shared'>{source}<target><size unit='GiB'>1</size>\
             <node>1</node></target></memory>"
        )
    };
    let pages = "<memoryBacking><hugepages><page size='1' unit='G' nodeset='1'/></hugepages></memoryBacking>";
    let small = "<source><pagesize unit='KiB'>2048</pagesize></source>";
    let other = "<memory model='nvdimm'><target><size unit='GiB'>1</size></target></memory>";
    let guest = parsed(&format!(
        "<memory unit='GiB'>4</memory>{pages}<devices>{}{}{other}</devices>",
        module(small),
        module("")
    ));
    let found = guest
        .memory
        .iter()
        .map(|ram| (ram.bytes, ram.pool_bytes, ram.shared));
    let expected = [
        (1 << 30, None, false),
        (1 << 30, Some(2 << 20), true),
        (1 << 30, Some(1 << 30), true),
    ];
    assert_eq!(found.collect::<Vec<_>>(), expected);
    assert_eq!(guest.ignored, ["<memory> nvdimm"]);
}

#[test]
fn memory_of_a_memfd_may_be_private() {
    for (backing, shared) in [
        ("<source type='memfd'/>", true),
        ("<source type='memfd'/><access mode='private'/>", false),
        ("<access mode='shared'/>", true),
    ] {
        let guest = parsed(&format!(
            "<memory>4096</memory><memoryBacking>{backing}<locked/></memoryBacking>"
        ));
        assert_eq!(guest.memory[0].shared, shared, "{backing}");
        assert_eq!(guest.ignored, ["<locked>"]);
    }
}

#[test]
fn units_are_as_libvirt_reads_them() {
    for (unit, bytes) in [
        ("unit='G'", 4 << 30),
        ("unit='gib'", 4 << 30),
        ("unit=''", 4 << 10),
        ("", 4 << 10),
        ("unit='MB'", 4_000_000),
        ("unit='PiB'", 4 << 50),
        ("unit='Byte'", 4),
    ] {
        // libvirt rounds up to whole MiB.
        let whole = u64::next_multiple_of(bytes, 1 << 20);
        assert_eq!(
            parsed(&format!("<memory {unit}>4</memory>")).bytes(),
            whole,
            "{unit}"
        );
    }
}

#[test]
fn arguments_for_qemu_are_read() {
    let with = |arguments: &[&str], rest: &str| {
        let arguments = arguments
            .iter()
            .map(|value| format!("<q:arg value='{value}'/>"));
        let arguments: String = arguments.collect();
        parsed(&format!(
            "<memory unit='GiB'>2</memory><vcpu>3</vcpu>{rest}<q:commandline>{arguments}</q:commandline>"
        ))
    };
    let guest = with(
        &[
            "-device",
            "vfio-pci,host=02:00.0",
            "-device",
            "intel-iommu",
            "-new",
        ],
        "",
    );
    assert_eq!(guest.devices, ["0000:02:00.0".to_owned().into()]);
    assert_eq!(guest.interface, Some(Interface::Type1));
    assert_eq!(guest.viommu.as_deref(), Some("intel-iommu"));
    assert_eq!(
        (guest.bytes(), guest.ignored),
        (2 << 30, vec!["-new".into()])
    );
    let object = [
        "-object",
        "memory-backend-file,id=m,size=2G,mem-path=/dev/hugepages,share=on,prealloc=on",
        "-numa",
        "node,memdev=m",
    ];
    let guest = with(&object, "");
    let [ram] = &guest.memory[..] else {
        panic!("{guest:?}");
    };
    assert_eq!(
        (ram.bytes, ram.shared, ram.prealloc_threads),
        (2 << 30, true, 3)
    );
    let cell = "<cpu><numa><cell memory='2' unit='GiB'/></numa></cpu>";
    let guest = with(&object, cell);
    assert_eq!((guest.bytes(), guest.memory.len()), (2 << 30, 1));
    assert_eq!(guest.ignored, ["memory object \"m\""]);
    let guest = with(&["-device", "vfio-pci,host=x", "-m", "1G"], "");
    assert_eq!(
        guest.ignored,
        [
            "-device vfio-pci, host: \"x\" is no PCI address like 0000:01:00.0",
            "-m 1 GiB"
        ]
    );
    let property = "<q:override><q:device alias='a'><q:frontend><q:property name='x-b' type='bool' value='true'/>\
        </q:frontend></q:device></q:override>";
    assert_eq!(with(&[], property).ignored, ["x-b of <q:override>"]);
}

#[test]
fn variables_in_the_place_of_elements_are_named() {
    let guest = parsed(
        "<memory>4096</memory>{{ backing }}<devices>\n ${CARDS} <disk/>{% if x %}<name>$X</name></devices>",
    );
    let expected = [
        "{{ backing }} in the place of elements of /domain",
        "${CARDS} in the place of elements of /domain/devices",
        "{% if x %} in the place of elements of /domain/devices",
    ];
    assert_eq!(guest.ignored, expected);
}

#[test]
fn a_virtual_iommu_and_a_confidential_guest_are_named() {
    let guest = parsed(
        "<memory>4096</memory><launchSecurity type='sev-snp'/><devices><iommu model='virtio'/></devices>",
    );
    assert_eq!(guest.viommu.as_deref(), Some("virtio"));
    assert_eq!(guest.confidential.as_deref(), Some("SEV-SNP"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Any text, and a good one with some bytes changed, is understood or refused.
    #[test]
    fn no_text_is_a_panic(
        any in any::<String>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 1..6),
    ) {
        let _ = libvirt(&any, POOL);
        let mut good = MACHINE.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(good.len());
            good[at] = byte;
        }
        if let Ok(guest) = libvirt(&String::from_utf8(good).unwrap(), POOL) {
            prop_assert!(guest.memory.len() <= 4);
            predict(&guest);
        }
    }

    /// Each number is one of a machine, or refused.
    #[test]
    fn no_number_is_a_panic(
        numbers in prop::collection::vec(prop_oneof![prop::sample::select(&NUMBERS[..]), any::<u64>()], 16),
        unit in prop::sample::select(vec!["b", "KiB", "MiB", "GiB", "TiB"]),
    ) {
        let [pages, cell, more, memory, id, small, threads, cpus, size, node, domain, bus, slot, function, _, _] =
            numbers[..] else { unreachable!() };
        let xml = format!("<domain><memory unit='{unit}'>{memory}</memory><vcpu>{cpus}</vcpu>
            <memoryBacking>
              <hugepages><page size='{pages}' unit='{unit}' nodeset='{cell}-{more}'/></hugepages>
              <allocation mode='immediate' threads='{threads}'/>
            </memoryBacking>
            <cpu><numa><cell id='{id}' memory='{small}' unit='{unit}'/></numa></cpu>
            <devices>
              <memory model='dimm'><target><size unit='{unit}'>{size}</size><node>{node}</node></target></memory>
              <hostdev type='pci'><source>
                <address domain='{domain}' bus='{bus}' slot='{slot}' function='{function}'/>
              </source></hostdev>
            </devices></domain>");
        match libvirt(&xml, POOL) {
            Ok(guest) => predict(&guest),
            Err(error) => prop_assert!(error.to_string().contains(|c: char| c.is_ascii_digit())),
        }
    }
}

#[test]
fn small_pages_are_of_no_pool() {
    let pages = "<hugepages><page size='4' unit='KiB'/></hugepages>";
    let guest = parsed(&format!(
        "<memory>4096</memory><memoryBacking>{pages}</memoryBacking>"
    ));
    let [ram] = &guest.memory[..] else {
        panic!("{guest:?}");
    };
    assert_eq!((ram.pool_bytes, ram.prealloc_threads), (None, 0));
}

#[test]
fn a_set_holds_what_it_names_and_not_what_it_excludes() {
    for (text, held) in [
        ("0", &[0][..]),
        ("1-3,^2", &[1, 3]),
        ("^1,0-2", &[0, 2]),
        (" 0 , 3-4", &[0, 3, 4]),
        ("3-1", &[]),
    ] {
        let set = Set::of(text).unwrap();
        let found: Vec<_> = (0..6).filter(|cell| set.holds(*cell)).collect();
        assert_eq!(found, held, "{text}");
    }
    for none in ["", "x", "1-", "0,,1", "^", "1024", "0-1024"] {
        assert!(Set::of(none).is_none(), "{none}");
    }
}

#[test]
fn an_address_is_of_numbers_as_c_writes_them() {
    let of = |address: &str| {
        let device = format!("<hostdev type='pci'><source><address {address}/></source></hostdev>");
        libvirt(
            &format!("<domain><memory>4096</memory><devices>{device}</devices></domain>"),
            POOL,
        )
        .map(|guest| guest.devices[0].address.clone())
        .map_err(|error| error.to_string())
    };
    for (text, address) in [
        ("", "0000:00:00.0"),
        (
            "domain='0x10000' bus='0x0a' slot='0x1f' function='7'",
            "10000:0a:1f.7",
        ),
        ("bus='10' slot='010'", "0000:0a:08.0"),
    ] {
        assert_eq!(of(text).as_deref(), Ok(address), "{text}");
    }
    for (text, said) in [
        (
            "domain='0x100000000'",
            "domain: \"0x100000000\" is no number from 0 to 4294967295",
        ),
        ("bus='256'", "bus: \"256\" is no number from 0 to 255"),
        ("slot='0x20'", "slot: \"0x20\" is no number from 0 to 31"),
        ("function='8'", "function: \"8\" is no number from 0 to 7"),
        ("function='08'", "function: \"08\" is no number from 0 to 7"),
        ("bus='0x+1'", "bus: \"0x+1\" is no number from 0 to 255"),
        ("bus=''", "bus: \"\" is no number from 0 to 255"),
    ] {
        let expected = format!("/domain/devices/hostdev/source/address {said}");
        assert_eq!(of(text), Err(expected), "{text}");
    }
}

#[test]
fn there_are_as_many_of_each_element_as_there_are_cells() {
    for (before, element, after, path) in [
        (
            "<memoryBacking><hugepages>",
            "<page size='2' unit='MiB' nodeset='0'/>",
            "</hugepages></memoryBacking>",
            "/domain/memoryBacking/hugepages/page",
        ),
        (
            "<cpu><numa>",
            "<cell memory='4096'/>",
            "</numa></cpu>",
            "/domain/cpu/numa/cell",
        ),
        (
            "<devices>",
            "<memory model='dimm'/>",
            "</devices>",
            "/domain/devices/memory",
        ),
        (
            "<devices>",
            "<memory model='sgx-epc'/>",
            "</devices>",
            "/domain/devices/memory",
        ),
        (
            "<devices>",
            "<hostdev type='pci'><source><address/></source></hostdev>",
            "</devices>",
            "/domain/devices/hostdev/source/address",
        ),
    ] {
        let of = |count| {
            let all = element.repeat(count);
            libvirt(
                &format!("<domain><memory>4096</memory>{before}{all}{after}</domain>"),
                POOL,
            )
        };
        of(1024).unwrap();
        let error = of(1025).unwrap_err().to_string();
        assert_eq!(error, format!("there are more than 1024 of {path}"));
    }
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let deep = "<a>".repeat(64);
    for (inner, said) in [
        ("", "there is no <memory> with a size"),
        (
            "<memory unit='XiB'>1</memory>",
            "/domain/memory unit: \"XiB\" is not known; \
             known are bytes, KB, KiB, MB, MiB, GB, GiB, TB, TiB",
        ),
        (
            "<memory>much</memory>",
            "/domain/memory: \"much\" is no number from 0 to 18446744073709551615",
        ),
        (
            "<memory unit='TiB'>18446744073709551615</memory>",
            "/domain/memory: 16.0 EiB is more than 64 PiB",
        ),
        ("<memory>0</memory>", "there is no <memory> with a size"),
        (
            "<cpu><numa><cell memory='65537' unit='TiB'/></numa></cpu>",
            "/domain/cpu/numa/cell memory: 64.0 PiB is more than 64 PiB",
        ),
        (
            "<cpu><numa><cell memory='65536' unit='TiB'/><cell memory='1'/></numa></cpu>",
            "all memory: 64.0 PiB is more than 64 PiB",
        ),
        (
            "<memory>1</memory><devices><memory model='dimm'><target>\
             <size unit='TiB'>99999</size></target></memory></devices>",
            "/domain/devices/memory/target/size: 97.7 PiB is more than 64 PiB",
        ),
        (
            "<cpu><numa><cell id='1024' memory='4096'/></numa></cpu>",
            "/domain/cpu/numa/cell id: \"1024\" is no number from 0 to 1023",
        ),
        (
            "<memoryBacking><hugepages><page size='0'/></hugepages></memoryBacking>",
            "/domain/memoryBacking/hugepages/page size: 0 B is no size of pages, which have a power of two \
             from 4 KiB to 16 GiB",
        ),
        (
            "<memoryBacking><hugepages><page size='3'/></hugepages></memoryBacking>",
            "/domain/memoryBacking/hugepages/page size: 3 KiB is no size of pages, which have a power of two \
             from 4 KiB to 16 GiB",
        ),
        (
            "<memoryBacking><hugepages><page size='32' unit='G'/></hugepages></memoryBacking>",
            "/domain/memoryBacking/hugepages/page size: 32 GiB is no size of pages, which have a power of two \
             from 4 KiB to 16 GiB",
        ),
        (
            "<memoryBacking><hugepages><page size='2048' nodeset='0-x'/></hugepages></memoryBacking>",
            "/domain/memoryBacking/hugepages/page nodeset: \"0-x\" is not known; \
             known are sets of cells like 0-3,^2, of 1024 cells",
        ),
        (
            "<memoryBacking><allocation threads='0'/></memoryBacking>",
            "/domain/memoryBacking/allocation threads: \"0\" is no number from 1 to 65536",
        ),
        (
            "<vcpu>65537</vcpu>",
            "/domain/vcpu: \"65537\" is no number from 1 to 65536",
        ),
        (
            "<memoryBacking><source type='disk'/></memoryBacking>",
            "/domain/memoryBacking/source type: \"disk\" is not known; \
             known are anonymous, file, memfd",
        ),
        ("<memory", "the XML is damaged near byte 24"),
        (&deep, "elements are nested deeper than 64"),
    ] {
        let error = libvirt(&format!("<domain>{inner}</domain>"), POOL).unwrap_err();
        assert_eq!(error.to_string(), said, "{inner}");
    }
    let error = libvirt("<network/>", POOL).unwrap_err().to_string();
    assert_eq!(
        error,
        "the root element is <network>; libvirt's is <domain>"
    );
    let open = libvirt("<domain><memory>4</memory>", POOL).unwrap_err();
    assert!(open.to_string().starts_with("the XML is damaged"), "{open}");
}

#[test]
fn memory_is_of_the_hosts_nodes_that_numatune_names() {
    let cells = "<memory unit='GiB'>2</memory><cpu><numa><cell id='0' memory='1' unit='GiB'/>\
        <cell id='1' memory='1' unit='GiB'/></numa></cpu>";
    let guest = parsed(&format!(
        "{cells}<numatune><memory mode='preferred' nodeset='0-3,^2'/><memnode cellid='1' nodeset='2'/></numatune>"
    ));
    let nodes = guest
        .memory
        .iter()
        .map(|ram| (ram.host_nodes.clone(), ram.bound));
    let nodes: Vec<_> = nodes.collect();
    assert_eq!(nodes, [(vec![0, 1, 3], false), (vec![2], true)]);
}

#[test]
fn a_domain_is_found_in_what_libvirt_keeps_of_it() {
    let device = "<interface type='network'><source network='sriov'/><actual type='hostdev'><source>\
        <address type='pci' bus='0x3b' slot='0' function='1'/></source></actual></interface>";
    let domain = format!(
        "<domain type='kvm'><memory unit='GiB'>2</memory><devices>{device}</devices></domain>"
    );
    let status = format!("<domstatus state='running'><pid>7</pid>{domain}</domstatus>");
    let guest = libvirt(&status, POOL).unwrap();
    assert_eq!(guest.devices[0].address, "0000:3b:00.1");
    assert_eq!(guest.bytes(), 2 << 30);
    let twice = libvirt(&domain.repeat(2), POOL).unwrap_err();
    assert_eq!(
        twice.to_string(),
        "the XML has a second root element, <domain>"
    );
}

#[test]
fn references_and_cdata_are_text() {
    let domain = "<domain type='kvm'><memory unit='&#71;iB'><![CDATA[1]]>&#54;</memory></domain>";
    assert_eq!(libvirt(domain, POOL).unwrap().bytes(), 16 << 30);
    let entity = libvirt("<domain><memory>&mem;</memory></domain>", POOL).unwrap_err();
    assert!(entity.to_string().contains("\"&mem;\""), "{entity}");
}
