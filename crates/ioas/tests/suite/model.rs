//! Random sequences of map, unmap, attach and detach against a plain model, by what devices see.
//!
//! Every word of the memory holds its own physical address, so that a read by DMA tells where it
//! came from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::common::*;
use ioas::{Ledger, MapError, Memory, Synthetic, UnmapError};
use iommu::{DeviceId, Port, RunMap, SoftwareUnit, TargetMemory};
use iopt::{FormatId, HeapTables, Prot};
use proptest::prelude::*;
use proptest::sample::Index;
use runs::{Iova, Offset, Pa, Span};

type Data = Arc<RunMap<Vec<AtomicU64>>>;
type Tables = Arc<HeapTables>;

/// Physical memory: eight stretches of 2 MiB, two by two adjacent.
const BLOCKS: u64 = 8;

fn block(n: u64) -> u64 {
    0x1_0000_0000 + n / 2 * (16 * MIB) + n % 2 * (2 * MIB)
}

fn data() -> Data {
    static DATA: OnceLock<Data> = OnceLock::new();
    DATA.get_or_init(|| {
        let words = |base: u64| {
            (0..2 * MIB / 8)
                .map(|n| AtomicU64::new(base + 8 * n))
                .collect()
        };
        Arc::new(RunMap::new((0..BLOCKS).map(|n| (block(n), words(block(n))))).unwrap())
    })
    .clone()
}

/// Window of the mappings: 16 MiB on both sides of a multiple of 1 GiB.
const WINDOW: Span<Iova> = Span::new(GIB - 16 * MIB, 32 * MIB);
const DEVICES: [DeviceId; 2] = [DeviceId::pci(1, 0, 0), DeviceId::pci(1, 0, 1)];

#[derive(Clone, Debug)]
enum Op {
    /// Object, first page and pages of it, page in the window, whether to align to 2 MiB.
    Map(Index, u64, u64, u64, bool, Prot),
    /// The area, or with it those up to another one, or any range.
    UnmapArea(Index),
    UnmapAreas(Index, Index),
    UnmapRange(u64, u64),
    UnmapAll,
    Attach(usize),
    Detach(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let prot = prop::sample::select(vec![Prot::RW, Prot::RW, Prot::READ]);
    let len = prop_oneof![1u64..20, 500u64..1100];
    let offset = prop_oneof![Just(0u64), 0u64..1024];
    prop_oneof![
        8 => (index(), offset, len, 0u64..8192, any::<bool>(), prot)
            .prop_map(|(o, first, len, at, align, prot)| Op::Map(o, first, len, at, align, prot)),
        3 => index().prop_map(Op::UnmapArea),
        2 => (index(), index()).prop_map(|(a, b)| Op::UnmapAreas(a, b)),
        2 => (0u64..8192, 1u64..4000).prop_map(|(at, len)| Op::UnmapRange(at, len)),
        1 => Just(Op::UnmapAll),
        2 => (0usize..2).prop_map(Op::Attach),
        1 => (0usize..2).prop_map(Op::Detach),
    ]
}

/// Layouts: what the runs of an object are, as pages in a block.
fn object() -> impl Strategy<Value = Vec<Span<Pa>>> {
    let run = prop_oneof![
        // A whole 2M page.
        3 => (0..BLOCKS).prop_map(|n| Span::new(block(n), 2 * MIB)),
        // Two of them that are adjacent, as one run and as two.
        1 => (0..BLOCKS / 2).prop_map(|n| Span::new(block(2 * n), 2 * MIB)),
        // Half of a 2M page, and fragments.
        2 => (0..BLOCKS, 0u64..2).prop_map(|(n, half)| Span::new(block(n) + half * MIB, MIB)),
        4 => (0..BLOCKS, 0u64..500, 1u64..12)
            .prop_map(|(n, page, pages)| Span::new(block(n) + page * PAGE, pages * PAGE)),
    ];
    prop::collection::vec(run, 1..8).prop_map(|mut runs| {
        // The neighbour behind each first half, so that runs join.
        if let Some(first) = runs.first().copied()
            && first.len == 2 * MIB
            && first.start == block(0)
        {
            runs.insert(1, Span::new(block(1), 2 * MIB));
        }
        runs
    })
}

struct Model {
    /// Device page to physical page and permissions.
    pages: BTreeMap<u64, (u64, Prot)>,
    /// First address to length, and to the object and the offset in it.
    areas: BTreeMap<u64, (u64, usize, u64)>,
    attached: [bool; 2],
}

impl Model {
    fn overlapping(&self, range: Span<Iova>) -> Vec<Span<Iova>> {
        self.ranges().filter(|area| area.overlaps(&range)).collect()
    }

    fn ranges(&self) -> impl Iterator<Item = Span<Iova>> {
        self.areas
            .iter()
            .map(|(start, (len, ..))| Span::new(*start, *len))
    }

    /// Pages that are pinned, each once: object and offset.
    fn pinned(&self) -> BTreeSet<(usize, u64)> {
        let areas = self.areas.values();
        let pages = |(len, object, offset): &(u64, usize, u64)| {
            let (object, offset) = (*object, *offset);
            let offsets = (offset..offset + len).step_by(PAGE as usize);
            offsets.map(move |page| (object, page))
        };
        areas.flat_map(pages).collect()
    }

    fn remove(&mut self, area: Span<Iova>) {
        self.areas.remove(&area.start);
        for page in (area.start..=area.last()).step_by(PAGE as usize) {
            assert!(self.pages.remove(&page).is_some());
        }
    }
}

struct Bench {
    tables: Tables,
    space: Space,
    unit: Arc<SoftwareUnit<Tables, Data>>,
    ports: Vec<Port<Tables, Data>>,
    ledger: Arc<Ledger>,
    synthetics: Vec<Arc<Synthetic>>,
    memories: Vec<Arc<Memory>>,
    model: Model,
    /// Addresses that the devices have read last: units remember them.
    looked: Vec<u64>,
}

impl Bench {
    fn new(format: (FormatId, u8), objects: &[Vec<Span<Pa>>]) -> Self {
        let tables = Arc::new(HeapTables::with_tables(256).unwrap());
        let unit = Arc::new(SoftwareUnit::new(tables.clone(), data()));
        let ledger = Ledger::new("", Some(GIB), 0);
        let synthetic = |runs: &Vec<Span<Pa>>| Arc::new(Synthetic::new(runs.iter().copied()));
        let synthetics: Vec<_> = objects.iter().map(synthetic).collect();
        let memory = |object: &Arc<Synthetic>| Memory::new(object.clone(), &ledger);
        Self {
            space: space(format.0, format.1, &tables),
            ports: DEVICES.map(|device| unit.port(device)).into(),
            unit,
            tables,
            memories: synthetics.iter().map(memory).collect(),
            synthetics,
            ledger,
            model: Model {
                pages: BTreeMap::new(),
                areas: BTreeMap::new(),
                attached: [false; 2],
            },
            looked: Vec::new(),
        }
    }

    fn act(&mut self, op: &Op, objects: &[Vec<Span<Pa>>]) {
        match op {
            Op::Map(object, first, pages, at, align, prot) => {
                let which = object.index(objects.len());
                let len = self.memories[which].len();
                let first = first * PAGE % len;
                let part = Span::new(first, (pages * PAGE).min(len - first));
                let mut iova = WINDOW.start + at * PAGE;
                if *align {
                    iova &= !(2 * MIB - 1);
                }
                self.map(iova, &objects[which], which, part, *prot);
            }
            Op::UnmapArea(area) => {
                if let Some(area) = self.area(*area) {
                    self.unmap(area);
                }
            }
            Op::UnmapAreas(one, other) => {
                if let (Some(one), Some(other)) = (self.area(*one), self.area(*other)) {
                    let (first, last) = if one < other {
                        (one, other)
                    } else {
                        (other, one)
                    };
                    self.unmap(Span::inclusive(first.start, last.last()).unwrap());
                }
            }
            Op::UnmapRange(at, len) => {
                self.unmap(Span::new(WINDOW.start + at * PAGE, len * PAGE));
            }
            Op::UnmapAll => {
                let unmapped = self
                    .space
                    .observed(&mut Watch::default())
                    .unmap_all()
                    .unwrap();
                assert_eq!(unmapped.areas, self.model.areas.len() as u64);
                self.model.areas.clear();
                self.model.pages.clear();
            }
            Op::Attach(n) => {
                let result = self.space.attach((self.unit.clone(), DEVICES[*n]));
                assert_eq!(result.is_err(), self.model.attached[*n]);
                self.model.attached[*n] = true;
            }
            Op::Detach(n) => {
                let result = self.space.detach(DEVICES[*n]);
                assert_eq!(result.is_ok(), self.model.attached[*n]);
                self.model.attached[*n] = false;
            }
        }
    }

    fn area(&self, index: Index) -> Option<Span<Iova>> {
        let areas: Vec<_> = self.model.areas.iter().collect();
        let (start, (len, ..)) = areas.get(index.index(areas.len().max(1)))?;
        Some(Span::new(**start, *len))
    }

    fn map(&mut self, iova: u64, runs: &[Span<Pa>], which: usize, part: Span<Offset>, prot: Prot) {
        let range = Span::new(iova, part.len);
        let memory = &self.memories[which];
        let result = self
            .space
            .observed(&mut Watch::default())
            .map(iova, memory, part, prot);
        if let Some(there) = self.model.overlapping(range).first() {
            let Err(MapError::Overlap { wanted, area }) = result else {
                panic!("{range} over {there}: {result:?}");
            };
            assert_eq!((wanted, area), (range, *there));
            return;
        }
        result.unwrap();
        self.model.areas.insert(iova, (part.len, which, part.start));
        let frames = runs
            .iter()
            .flat_map(|run| (run.start..=run.last()).step_by(PAGE as usize));
        let frames = frames
            .skip((part.start / PAGE) as usize)
            .take((part.len / PAGE) as usize);
        for (n, frame) in frames.enumerate() {
            let page = iova + n as u64 * PAGE;
            assert_eq!(self.model.pages.insert(page, (frame, prot)), None);
        }
    }

    fn unmap(&mut self, range: Span<Iova>) {
        let areas = self.model.overlapping(range);
        let result = self.space.observed(&mut Watch::default()).unmap(range);
        if let Some(cut) = areas.iter().find(|area| !range.covers(area)) {
            let Err(UnmapError::CutsArea { area, .. }) = result else {
                panic!("{range} cuts {cut}: {result:?}");
            };
            assert_eq!(area, *cut);
            return;
        }
        let unmapped = result.unwrap();
        let bytes: u64 = areas.iter().map(|area| area.len).sum();
        let before = self.model.pinned().len();
        assert_eq!(unmapped.areas, areas.len() as u64);
        areas.into_iter().for_each(|area| self.model.remove(area));
        let unpinned = (before - self.model.pinned().len()) as u64 * PAGE;
        assert_eq!((unmapped.bytes, unmapped.unpinned), (bytes, unpinned));
    }

    /// Checks sums, which do not depend on an address.
    fn check_sums(&self) {
        // Memory that is mapped twice is pinned and charged once.
        let once = self.model.pinned().len() as u64 * PAGE;
        assert_eq!(self.ledger.in_use(), once);
        let pinned: u64 = self.synthetics.iter().map(|memory| memory.pinned()).sum();
        assert_eq!(pinned, once);
        let tables = self.space.with_table(|table| table.tables()).unwrap();
        assert_eq!(self.tables.in_use(), tables);
        let areas: Vec<_> = self
            .space
            .areas()
            .into_iter()
            .map(|area| area.range())
            .collect();
        let expected: Vec<_> = self.model.ranges().collect();
        assert_eq!(areas, expected);
        let mapped: u64 = expected.iter().map(|area| area.len).sum();
        let leaves = leaves(&self.space);
        assert_eq!(leaves.iter().map(|leaf| leaf.run.len).sum::<u64>(), mapped);
    }

    /// Both devices read, and write, around all borders and at `samples`.
    fn check_dma(&mut self, samples: &[u64]) {
        let mut places: Vec<u64> = samples
            .iter()
            .map(|page| WINDOW.start + page * PAGE)
            .collect();
        for (start, (len, ..)) in &self.model.areas {
            let end = start + len;
            places.extend([
                start - PAGE,
                *start,
                start + len / 2 / PAGE * PAGE,
                end - PAGE,
                end,
            ]);
        }
        let before = std::mem::replace(&mut self.looked, places.clone());
        for page in before.into_iter().chain(places) {
            let expected = self.model.pages.get(&page);
            for (port, attached) in self.ports.iter_mut().zip(self.model.attached) {
                for at in [page, page + PAGE - 8] {
                    let mut word = [0];
                    let read = port.read(at, &mut word);
                    let (Some((frame, prot)), true) = (expected, attached) else {
                        assert!(read.is_err(), "{at:#x} holds {word:x?}");
                        continue;
                    };
                    read.unwrap();
                    assert_eq!(word, [frame + at % PAGE], "{at:#x}");
                    let writable = prot.contains(Prot::WRITE);
                    let written = port.write(at, &[!word[0]]);
                    assert_eq!(written.is_ok(), writable, "{at:#x}");
                    let cell = Span::new(word[0], 8);
                    let undo = |cells: &[AtomicU64]| {
                        let there = cells[0].swap(word[0], Ordering::Relaxed);
                        assert_eq!(there == !word[0], writable, "{at:#x}");
                    };
                    data().with_cells(cell, &mut { undo }).unwrap();
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn devices_see_what_a_plain_model_says(
        format in prop::sample::select(FORMATS.to_vec()),
        objects in prop::collection::vec(object(), 1..5),
        ops in prop::collection::vec((op(), prop::collection::vec(0u64..8192, 4)), 1..30),
    ) {
        let mut bench = Bench::new(format, &objects);
        bench.act(&Op::Attach(0), &objects);
        for (op, samples) in &ops {
            bench.act(op, &objects);
            bench.check_sums();
            bench.check_dma(samples);
        }
        bench.act(&Op::UnmapAll, &objects);
        bench.check_sums();
        prop_assert_eq!(bench.tables.in_use(), 1);
        let Bench { space, tables, .. } = bench;
        space.close().unwrap();
        prop_assert_eq!(tables.in_use(), 0);
    }
}
