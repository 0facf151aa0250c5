//! Topology files, tables of the firmware, and what `/proc` says of a process.

use dmaspace::topology::{Topology, UnitAddress, proximity};
use dmaspace_cli::inside::{GuestTopology, Plan};
use dmaspace_cli::inside::{Host, areas, configured, libvirt, node_bytes, of_areas, qemu_line};
use hostmem::ThpMode;

use super::{Bytes, within};

/// A file, what is planned for it, and a guest that looks like it.
pub fn topology(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let bytes = text.len() as u64;
    // TOML is read into events, then values: some hundred bytes for the shortest of them.
    let parsed = within((1 << 20) + 1024 * bytes, || Topology::parse(&text));
    let Ok(topology) = parsed else {
        return;
    };
    let pairs = (topology.nodes().len() * topology.devices().len()) as u64;
    let most = (1 << 20) + 1024 * bytes + 1024 * pairs;
    within(most, || {
        let plan = Plan::new(&topology, 1 << 40);
        assert!(plan.policies.len() <= 2 + topology.nodes().len());
    });
    let distances = (topology.nodes().len() as u64).pow(2);
    within(most + 256 * distances, || {
        if let Ok(mut guest) = GuestTopology::new(&topology, 8 << 30, Some(2 << 20)) {
            guest.viommu = bytes % 2 == 0;
            guest.qemu().expect("the bus numbers were shared out");
            let _ = guest.libvirt();
        }
    });
}

/// DMAR, IORT, RIMT; nothing is allocated for them.
pub fn acpi(data: &[u8]) {
    let mut bytes = Bytes(data);
    let signature = [&b"DMAR"[..], b"IORT", b"RIMT", b""][bytes.below(4)];
    let registers = UnitAddress::Registers(bytes.u64());
    let function = UnitAddress::Function("0001:01:01.1".into());
    let table = [signature, bytes.0].concat();
    within(0, || {
        for unit in [&registers, &function] {
            let found = proximity(&table, unit);
            assert_eq!(found, proximity(&table, unit));
        }
    });
}

/// `smaps`, and behind zero bytes `numa_maps`, QEMU's command line and libvirt's XML, and what is predicted of these.
pub fn proc(data: &[u8]) {
    let mut texts = data
        .splitn(4, |byte| *byte == 0)
        .map(String::from_utf8_lossy);
    let mut text = || texts.next().unwrap_or_default();
    let (smaps, maps, line, xml) = (text(), text(), text(), text());
    // The shortest line of an area has 12 bytes.
    let mut found = within(4096 + 64 * smaps.len() as u64, || areas(&smaps));
    for area in &found {
        assert!(area.address.checked_add(area.bytes).is_some() && !area.name.contains('\x1b'));
    }
    let nodes = within(4096 + 64 * data.len() as u64, || node_bytes(&maps, &found));
    assert!(nodes.is_sorted_by(|one, next| one.0 < next.0));
    let most = (1 << 20) + 1024 * data.len() as u64;
    let pool = 2 << 20;
    let host = Host {
        private: ThpMode::Never,
        shared: ThpMode::Never,
        default_pool: pool,
    };
    within(most, || {
        let words: Vec<_> = line.split(' ').map(Into::into).collect();
        let _ = of_areas(&mut found, &words, pool);
        for guest in [qemu_line(&line, pool), libvirt(&xml, pool)] {
            match guest {
                Ok(guest) => {
                    let found = configured(guest, &host, false);
                    assert!(!format!("{found:?}").contains('\x1b'));
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    });
}
