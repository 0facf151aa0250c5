//! Leaves that outlive nothing, and batches in parts.

use iopt::format::{RiscV, RiscVG};
use iopt::{Format, Gather, NoRuns, Prot, Table, TableOps as _};
use runs::SizeHistogram;

use super::*;

/// Maps pages as the format can, has the device reach them through the unit's own walk, takes them away,
/// one half by a flush and the other by the detach, and looks that neither this device nor one of another
/// domain reaches them.
fn leaves<F: Format>(format: F) {
    let tables = Arc::new(HeapTables::with_tables_at(64, 1 << 40).unwrap());
    let mut other = Table::new(format, tables.clone()).unwrap();
    let mut table = Table::new(format, tables.clone()).unwrap();
    let prots = (0..=Prot::all().bits()).map(Prot::from_bits_retain);
    let prots = prots.filter(|prot| format.leaf_bits(*prot).is_some());
    for (prot, capabilities) in prots.flat_map(|prot| [(prot, PLAIN), (prot, RICH)]) {
        let (driver, model) = enabled(capabilities, CONFIG);
        model.state().tables = Some(tables.clone());
        driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
        driver.attach(DeviceId(1), OTHER, other.root()).unwrap();
        let pages = [5, 6, 0x205, 0x40_0000];
        for page in pages {
            let memory = [Span::new(1 << 30 | page << 12, 0x1000)];
            table.map(page << 12, &memory, prot).unwrap();
            assert!(model.reaches(ID, None, page), "{prot}");
        }
        let mut gather = Gather::new();
        for page in &pages[..2] {
            let page = Span::new(page << 12, 0x1000);
            table.unmap(page, &mut gather, &mut NoRuns).unwrap();
        }
        let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
        table.reclaim(flushed.unwrap());
        let reached = |device, page| model.reaches(device, None, page);
        for page in &pages[..2] {
            let still = [ID, 1].map(|device| reached(device, *page));
            assert_eq!(still, [false; 2], "{format:?}, {prot}: after a flush");
        }
        driver.detach(DEVICE).unwrap();
        // The domain's number goes to another table.
        driver.attach(DEVICE, DOMAIN, other.root()).unwrap();
        for page in pages {
            let still = [ID, 1].map(|device| reached(device, page));
            assert_eq!(still, [false; 2], "{format:?}, {prot}: after a detach");
        }
        let mut gather = Gather::new();
        for page in &pages[2..] {
            let page = Span::new(page << 12, 0x1000);
            table.unmap(page, &mut gather, &mut NoRuns).unwrap();
        }
        let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
        table.reclaim(flushed.unwrap());
    }
    for table in [&mut table, &mut other] {
        assert_eq!(table.leaf_sizes(), SizeHistogram::new());
    }
}

#[test]
fn no_leaf_that_a_table_can_hold_outlives_its_flush_or_the_detach() {
    for (updates, types) in [(false, false), (false, true), (true, false), (true, true)] {
        for levels in 3..=5 {
            let first = RiscV::new(levels).unwrap();
            let first = first.with_hardware_updates(updates);
            leaves(first.with_memory_types(types));
            let second = RiscVG::new(levels).unwrap();
            let second = second.with_hardware_updates(updates);
            leaves(second.with_memory_types(types));
        }
    }
}

#[test]
fn a_batch_that_the_queue_does_not_hold_goes_in_parts() {
    let config = Config {
        pasid_bits: 17,
        ..CONFIG
    };
    let memory = Arc::new(HeapTables::with_tables(64).unwrap());
    let model = Model::new(memory.clone(), PLAIN);
    let driver = RiscvIommu::new(model.clone(), memory, config).unwrap();
    driver.enable().unwrap();
    let tlb = Some(DeviceTlb { queue_depth: 0 });
    driver.set_device_tlb(DEVICE, tlb).unwrap();
    for pasid in 1..=600 {
        driver
            .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, root(0x1000, 4))
            .unwrap();
    }
    model.received();
    let before = driver.counters();
    driver.invalidate_domain(DOMAIN).unwrap();
    let after = driver.counters();
    // 1 and a fence, 600, and a fence after each 32 of them.
    assert_eq!(after.commands - before.commands, 2 + 600 + 18);
    assert_eq!(
        (after.waits - before.waits, after.batches - before.batches),
        (3, 1)
    );
    let received = model.received();
    let (mut under_way, mut processes) = (0, Vec::new());
    for received in received {
        match received {
            Received::Tlb(ID, false, Some(process), (0, 52)) => {
                under_way += 1;
                processes.push(process);
            }
            Received::Fence | Received::Wait => under_way = 0,
            other => assert_eq!(other, whole(7)),
        }
        assert!(under_way <= 32);
    }
    assert!(processes.into_iter().eq(1..=600));
}
