//! Pieces of a kernel's mappings: the memory that a container can map, and random operations against a page
//! for a page.

use std::sync::{Arc, Mutex};

use crate::plain_kernel::*;
use ioas::{Ioas, Ledger, Mapper, Memory, ReleaseError, UnmapError, pieces_needed};
use iopt::{Interruption, Prot};
use proptest::prelude::*;
use runs::{Iova, Span};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Largest guest memory, a power of two with 3 GiB of it below 4 GiB, by granule, as `docs/semantics.md` has it.
#[test]
fn a_granule_bounds_the_memory_of_a_container() {
    let pieces = |size: u64, granule| {
        let parts = [Span::new(0, 3 * GIB), Span::new(4 * GIB, size - 3 * GIB)];
        pieces_needed(parts, Some(granule))
    };
    for (granule, most) in [(2, 64), (16, 512), (64, 2048), (128, 4096)] {
        assert!(pieces(most * GIB, granule * MIB) <= 65_535, "{granule} MiB");
        assert!(
            pieces(2 * most * GIB, granule * MIB) > 65_535,
            "{granule} MiB"
        );
    }
}

const PAGES: usize = 48;
const BASE: u64 = 1 << 30;
const MEMORY: u64 = 1 << 40;

#[derive(Clone, Debug)]
enum Op {
    /// First page, pages, page in the memory, may devices write.
    Map(usize, usize, u64, bool),
    /// First page, pages, with permission for a gap.
    Cut(usize, usize, bool),
    Unmap(usize, usize),
    TakeOut(usize, usize, bool),
    PutBack(usize, usize),
    Release(usize, usize, bool),
    Restore(usize, usize),
    Attach,
    Detach,
    /// The n-th call of the next operation fails.
    Fail(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let page = || 0..PAGES;
    let len = || prop_oneof![1..4usize, 1..20usize];
    prop_oneof![
        6 => (page(), len(), 0..64u64, any::<bool>()).prop_map(|(at, len, from, write)| Op::Map(at, len, from, write)),
        // One memory page for one device page: what goes on in each other is joined.
        6 => (page(), len()).prop_map(|(at, len)| Op::Map(at, len, at as u64, true)),
        3 => (page(), len(), any::<bool>()).prop_map(|(at, len, gap)| Op::Cut(at, len, gap)),
        2 => (page(), len()).prop_map(|(at, len)| Op::Unmap(at, len)),
        2 => (page(), len(), any::<bool>()).prop_map(|(at, len, gap)| Op::TakeOut(at, len, gap)),
        2 => (page(), len()).prop_map(|(at, len)| Op::PutBack(at, len)),
        2 => (page(), len(), any::<bool>()).prop_map(|(at, len, gap)| Op::Release(at, len, gap)),
        2 => (page(), len()).prop_map(|(at, len)| Op::Restore(at, len)),
        1 => Just(Op::Attach),
        1 => Just(Op::Detach),
        2 => (0..6usize).prop_map(Op::Fail),
    ]
}

/// State of a page of device addresses: page of the memory, may devices write, is it out, is it released.
type Page = Option<(u64, bool, bool, bool)>;

fn span(at: usize, len: usize) -> Span<Iova> {
    Span::new(BASE + at as u64 * PAGE, len.min(PAGES - at) as u64 * PAGE)
}

/// Returns true if devices are to see it.
const fn there((_, _, out, released): (u64, bool, bool, bool)) -> bool {
    !out && !released
}

fn run<const IOMMUFD: bool>(ops: &[Op], granule: Option<u64>, entries: u64, merging: Interruption) {
    let world: Arc<Mutex<World>> = World::new(Plain::<IOMMUFD>::PROFILE);
    world.lock().unwrap().entries = entries;
    let mapper = Plain::<IOMMUFD>::new(&world, &Arc::default());
    let space = Ioas::options()
        .granule(granule)
        .over_mapper(mapper)
        .unwrap();
    space.set_merging(merging);
    let ledger = Ledger::new("a counter", None, 0);
    let (address, file) = (Some(MEMORY), None);
    let fake = Fake {
        len: 128 * PAGE,
        address,
        file,
    };
    let memory = Memory::new(Arc::new(fake), &ledger);
    let device = Arc::new(Device::default());
    let mut pages: [Page; PAGES] = [None; PAGES];
    let mut attached = false;
    for op in ops {
        let before = pages;
        let calls = world.lock().unwrap().calls.len();
        match *op {
            Op::Map(at, len, from, write) => {
                let range = span(at, len);
                let prot = if write { Prot::RW } else { Prot::READ };
                let part = Span::new(from * PAGE, range.len);
                if space.map(range.start, &memory, part, prot).is_ok() {
                    for (n, page) in pages[at..].iter_mut().take(len).enumerate() {
                        assert!(page.is_none());
                        *page = Some((from + n as u64, write, false, false));
                    }
                }
            }
            Op::Cut(at, len, gap) => {
                let how = if gap {
                    Interruption::Allowed
                } else {
                    Interruption::Refused
                };
                match space.unmap_cutting(span(at, len), how) {
                    Ok(_) => pages[at..]
                        .iter_mut()
                        .take(len)
                        .for_each(|page| *page = None),
                    Err(cause) => refused(&cause, gap),
                }
            }
            Op::Unmap(at, len) => match space.unmap(span(at, len)) {
                Ok(_) => pages[at..]
                    .iter_mut()
                    .take(len)
                    .for_each(|page| *page = None),
                Err(UnmapError::CutsArea { .. }) => {}
                Err(cause) => refused(&cause, false),
            },
            Op::TakeOut(at, len, gap) => {
                let how = if gap {
                    Interruption::Allowed
                } else {
                    Interruption::Refused
                };
                match space.take_out(span(at, len), how) {
                    Ok(_) => pages[at..]
                        .iter_mut()
                        .take(len)
                        .flatten()
                        .for_each(|page| page.2 = true),
                    Err(UnmapError::Hole { .. }) => {}
                    Err(cause) => refused(&cause, gap),
                }
            }
            Op::PutBack(at, len) => {
                let _ = space.put_back(span(at, len), Interruption::Refused);
                // After an error some are back: the areas say which.
                for (n, page) in pages.iter_mut().enumerate() {
                    if let (Some(page), Some(area)) = (page, space.area_at(span(n, 1).start)) {
                        page.2 = area.is_out();
                    }
                }
            }
            Op::Release(at, len, gap) => {
                let how = if gap {
                    Interruption::Allowed
                } else {
                    Interruption::Refused
                };
                let mut causes = Vec::new();
                let mut kept = |_, cause| causes.push(cause);
                space.release(&[span(at, len)], how, &mut kept);
                match causes.pop() {
                    None => pages[at..]
                        .iter_mut()
                        .take(len)
                        .flatten()
                        .for_each(|page| page.3 = true),
                    Some(ReleaseError::Unmap(UnmapError::Hole { .. })) => {}
                    Some(ReleaseError::Unmap(cause)) => refused(&cause, gap),
                    Some(cause) => panic!("{cause}"),
                }
            }
            Op::Restore(at, len) => {
                let how = Interruption::Refused;
                let mut failed = Vec::new();
                let mut tell = |range: Span<Iova>, _| failed.push(range);
                space.restore(&[span(at, len)], how, &mut tell);
                for (n, page) in pages.iter_mut().enumerate().skip(at).take(len) {
                    let stays = failed.iter().any(|range| range.covers(&span(n, 1)));
                    page.iter_mut().for_each(|page| page.3 &= stays);
                }
            }
            Op::Attach => attached |= space.attach(device.clone()).is_ok(),
            Op::Detach => {
                // Mappings that cannot be unmapped any more without a device stay until the next one comes.
                world.lock().unwrap().fail.clear();
                attached &= space.detach(&device).is_err();
            }
            Op::Fail(n) => {
                world.lock().unwrap().fail = [n].into();
                continue;
            }
        }
        let mut world = world.lock().unwrap();
        let failed = !world.fail.is_empty();
        world.fail.clear();
        // Without permission, what stays has never been away.
        let gaps = matches!(
            *op,
            Op::Cut(_, _, true)
                | Op::TakeOut(_, _, true)
                | Op::Release(_, _, true)
                | Op::Detach
                | Op::Attach
        );
        if !gaps && merging == Interruption::Refused {
            for (map, range) in &world.calls[calls..] {
                for (n, (was, is)) in before.iter().zip(&pages).enumerate() {
                    let stays = was == is && was.is_some_and(there);
                    assert!(
                        *map || !stays || !range.overlaps(&span(n, 1)),
                        "{op:?} had a gap at {n}"
                    );
                }
            }
        }
        let mut charged = 0;
        for (n, page) in pages.iter().enumerate() {
            let expected = page.filter(|page| attached && there(*page));
            let found = world.translate(0, span(n, 1).start);
            assert_eq!(
                found,
                expected.map(|(from, ..)| MEMORY + from * PAGE),
                "{op:?} {n} {failed}"
            );
            charged += u64::from(expected.is_some()) * PAGE;
        }
        // Pages that are released and not out keep their charge.
        let released = |page: &&(u64, bool, bool, bool)| page.3 && !page.2;
        let mut pages: Vec<u64> = pages
            .iter()
            .flatten()
            .filter(released)
            .map(|page| page.0)
            .collect();
        if IOMMUFD {
            pages.sort_unstable();
            pages.dedup();
        }
        let kept = if attached {
            pages.len() as u64 * PAGE
        } else {
            0
        };
        let pieces: Vec<Span<Iova>> = space.kernel_mappings().unwrap();
        let mappings = world.spaces[0].mappings.iter();
        let there: Vec<Span<Iova>> = mappings
            .map(|(at, mapping)| Span::new(*at, mapping.len))
            .collect();
        assert_eq!(pieces, there);
        for piece in &pieces {
            assert!(granule.is_none_or(|granule| piece.start / granule == piece.last() / granule));
        }
        if IOMMUFD {
            assert_eq!(memory.reserved(), kept, "{op:?}");
            // Never less than the kernel, and no more than if nothing were shared.
            let in_use = ledger.in_use() - memory.reserved();
            assert!((world.locked()..=charged).contains(&in_use), "{op:?}");
        } else {
            assert!(pieces.len() as u64 <= entries);
            assert_eq!(world.locked(), charged, "{op:?}");
            assert_eq!(ledger.in_use() - charged, kept, "{op:?}");
        }
    }
    world.lock().unwrap().fail.clear();
    space.close().unwrap();
    assert_eq!(ledger.in_use(), 0);
    assert!(world.lock().unwrap().spaces[0].mappings.is_empty());
}

fn refused(cause: &UnmapError, gap: bool) {
    match cause {
        UnmapError::Kernel(_) => {}
        // With permission only where there are no entries for what stays.
        UnmapError::CutsMapping { .. } => {}
        cause => panic!("{cause} ({gap})"),
    }
}

proptest! {
    #[test]
    fn a_container_maps_what_a_page_for_a_page_says(
        ops in prop::collection::vec(op(), 1..60),
        granule in prop::sample::select(vec![None, Some(4 * PAGE), Some(16 * PAGE)]),
        entries in prop_oneof![Just(65_535u64), 6..20u64],
        merging in prop::sample::select(vec![Interruption::Refused, Interruption::Allowed]),
    ) {
        run::<false>(&ops, granule, entries, merging);
    }

    #[test]
    fn iommufd_maps_what_a_page_for_a_page_says(
        ops in prop::collection::vec(op(), 1..60),
        granule in prop::sample::select(vec![None, Some(4 * PAGE), Some(16 * PAGE)]),
    ) {
        run::<true>(&ops, granule, u64::MAX, Interruption::Refused);
    }
}
