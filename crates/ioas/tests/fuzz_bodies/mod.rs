//! Bodies of the fuzz targets: `fuzz/` calls these functions with any bytes that it comes upon, `tests/allocations.rs`
//! with those that it came upon before.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;

use std::sync::Arc;

use bytes::{Bytes, Target};
use ioas::{HandedArea, HandedDomain, Handover, Ioas, Ledger, Memory, Synthetic, Tracking};
use iommu::{DeviceId, DomainId};
use iopt::{AnyTable, FormatId, HeapTables, Pending, Prot};
use runs::{Iova, Pa, PageSizes, Span};

use crate::allocated::within;

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 1] = [("handover", handover)];

const PAGE: u64 = 4096;
/// Mappings of the tables: device address, offset in the memory, bytes.
const MAPPED: [(u64, u64, u64); 3] = [
    (1 << 30, 0, 4 * PAGE),
    (1 << 40, 8 * PAGE, 2 * PAGE),
    (u64::MAX >> 16 & !0xffff, 2 * PAGE, PAGE),
];
const FRAMES: [Span<Pa>; 2] = [
    Span::new(0x10_0000, 8 * PAGE),
    Span::new(0x80_0000, 8 * PAGE),
];

/// Physical address of the memory at this offset.
fn frame(offset: u64) -> u64 {
    match offset.checked_sub(FRAMES[0].len) {
        None => FRAMES[0].start + offset,
        Some(behind) => FRAMES[1].start + behind,
    }
}

/// The handover that fits, changed by what the bytes say, is taken over or refused; a refused one leaves
/// nothing held, and one that is taken over can be used and ended.
fn handover(data: &[u8]) {
    let mut bytes = Bytes(data);
    let tables = Arc::new(HeapTables::with_tables(64).expect("there is memory"));
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone());
    let table = table.expect("there are such tables");
    for (iova, offset, len) in MAPPED {
        let run = Span::new(frame(offset), len);
        table.map(iova, &[run], Prot::RW).expect("there is room");
    }
    let area = |(start, offset, len): (u64, u64, u64)| HandedArea {
        range: Span::new(start, len),
        memory: 0,
        offset,
        prot: Prot::RW,
        out: false,
        released: false,
        cut: [false; 2],
    };
    let mut handed = Handover {
        domains: vec![HandedDomain {
            id: DomainId(1),
            root: table.root(),
            page_sizes: sizes,
            coherent: None,
            devices: Vec::new(),
        }],
        areas: MAPPED.map(area).into(),
        ..Handover::default()
    };
    change(&mut handed, &mut bytes);

    let ledger = Ledger::new("a counter", Some(1 << 30), 0);
    let memory = Memory::new(Arc::new(Synthetic::new(FRAMES)), &ledger);
    let given = vec![(table, Vec::new())];
    // The batches of an address space, and of each record a few copies.
    let most = (1 << 20) + 1024 * data.len() as u64;
    let memories = [memory.clone()];
    let taken = within(most, || Ioas::adopt(&handed, &memories, given, None));
    match taken {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            drop(error);
            assert_eq!((memory.held(), ledger.in_use()), (0, 0));
        }
        Ok(space) => {
            let windows = space.windows();
            assert!(
                windows
                    .iter()
                    .all(|window| Span::<Iova>::checked(window.start, window.len).is_some())
            );
            let anywhere = space.map_anywhere(&memory, Span::new(0, PAGE), Prot::READ);
            if let Ok(iova) = anywhere {
                let allowed = &handed.allowed;
                assert!(allowed.is_empty() || allowed.iter().any(|range| range.contains(iova)));
            }
            let words = [0u64; 8];
            let pending = Pending::new(words, Span::new(1 << 30, 512 * PAGE), PAGE);
            let _ = space.harvest(&mut pending.expect("there is a word for 64 pages"));
            let _ = space.unmap_all();
            let _ = space.close();
            assert_eq!((memory.held(), ledger.in_use()), (0, 0));
        }
    }
}

fn tracking(nth: usize) -> Tracking {
    let leaf = [None, Some(0), Some(PAGE), Some(u64::MAX)];
    Tracking {
        leaf: leaf[nth],
        ..Tracking::default()
    }
}

/// One change after the other.
fn change(handed: &mut Handover, bytes: &mut Bytes<'_>) {
    while !bytes.is_empty() {
        let nth = bytes.below(4);
        let span = |bytes: &mut Bytes<'_>| {
            let shift = bytes.u8() % 64;
            Span::new(bytes.u64() << shift, u64::from(bytes.u16()) << (shift & 31))
        };
        let what = bytes.u8() % 16;
        let area = handed.areas.get_mut(nth);
        match (what, area) {
            (0, _) => handed.allowed.push(span(bytes)),
            (1, _) => handed.written.push(span(bytes)),
            (2, _) => handed.kept = true,
            (3, _) => handed.tracking = Some(tracking(nth)),
            (4, _) => handed.domains[0].id = DomainId(bytes.u16().into()),
            (5, _) => handed.domains[0].root.address = bytes.u64(),
            (6, _) => handed.domains[0]
                .devices
                .push(DeviceId::pci(0, bytes.u8(), 0)),
            (7, _) => {
                let copy = handed.domains[0].clone();
                handed.domains.push(copy);
            }
            (8, Some(area)) => area.range = span(bytes),
            (9, Some(area)) => area.offset = bytes.u64(),
            (10, Some(area)) => area.memory = bytes.u64() as usize,
            (11, Some(area)) => area.out = !area.out,
            (12, Some(area)) => area.released = !area.released,
            (13, Some(area)) => area.prot = Prot::from_bits_truncate(bytes.u8().into()),
            (14, Some(_)) => drop(handed.areas.remove(nth)),
            (_, Some(area)) => {
                let copy = *area;
                handed.areas.push(copy);
            }
            (_, None) => {}
        }
    }
}
