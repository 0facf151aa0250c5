//! Placement of memory, and requests that the machine refuses.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use hostmem::{
    Backing, FrameSource, FramesError, HugeSize, Mapping, MappingError, Pool, PoolError, RaisedPool,
};
use runs::Span;

use super::*;

#[test]
fn stand_in_addresses_are_used_once_and_lie_in_their_window() {
    let _turn = turn();
    let Some(pinner) = pinner(2 * MIB, 8 * MIB) else {
        return;
    };
    let mut used = std::collections::HashSet::new();
    let mut kept = Vec::new();
    for (backing, len) in [
        (Backing::Anon4K, 333 * PAGE),
        (Backing::Thp, 2 * MIB + 5 * PAGE),
        (Backing::Memfd, MIB),
    ] {
        let Memory { mapping, .. } = memory(backing, len).unwrap();
        let whole = Span::new(0, len);
        let pin = pinner.pin(&mapping, whole, &mut on).unwrap();
        let source = match backing {
            Backing::Memfd => FrameSource::FileOffset,
            _ => FrameSource::Synthetic { seed: 9 },
        };
        let (runs, entries) = runs_of(&pin, whole, source, 10);
        let pages = pages_of(&runs);
        assert_eq!(pages.len() as u64 * PAGE, len);
        assert_eq!(entries, 0);
        match backing {
            Backing::Memfd => assert_eq!(runs.len(), 1),
            // Two blocks of 2 MiB, which may come out as neighbours.
            Backing::Thp => assert!(runs.len() <= 2, "{runs:?}"),
            _ => assert!(runs.len() > 300, "{}", runs.len()),
        }
        // A part says the same as the whole.
        let (part, _) = runs_of(&pin, Span::new(7 * PAGE, 90 * PAGE), source, 3);
        assert_eq!(pages_of(&part), pages[7..97]);
        for page in pages {
            assert!((1 << 40..1 << 43).contains(&page));
            assert!(used.insert(page), "{page:#x} twice");
        }
        if backing != Backing::Memfd {
            let result = pin.runs(whole, FrameSource::FileOffset);
            assert!(
                matches!(result, Err(FramesError::NoFile { .. })),
                "{result:?}"
            );
        }
        kept.push(pin);
    }
}

#[test]
fn bad_lengths_and_nodes_are_refused_with_their_numbers() {
    let _turn = turn();
    let message = |backing, len, node| Mapping::new(backing, len, node).unwrap_err().to_string();
    assert_eq!(
        message(Backing::Thp, 0, None),
        "a memory object cannot have 0 bytes"
    );
    assert_eq!(
        message(Backing::Hugetlb2M, MIB, None),
        "1048576 bytes are no multiple of the 2 MiB pages of hugetlb-2m"
    );
    let error = Mapping::new(Backing::Memfd, 1 << 60, None).unwrap_err();
    assert!(
        matches!(error, MappingError::MoreThanAvailable { len, .. } if len == 1 << 60),
        "{error}"
    );
    let error = Mapping::new(Backing::Hugetlb1G, 1 << 60, None).unwrap_err();
    assert!(
        matches!(error, MappingError::HugePages { needed, .. } if needed == 1 << 30),
        "{error}"
    );
    let error = Mapping::new(Backing::Anon4K, PAGE, Some(63)).unwrap_err();
    assert!(
        matches!(&error, MappingError::NoSuchNode { node: 63, .. }),
        "{error}"
    );
}

#[test]
fn memory_is_placed_through_the_node_policy() {
    struct TwoNodes(Mutex<Vec<(u64, u64, u32)>>);
    impl hostmem::NodePolicy for TwoNodes {
        fn memory_nodes(&self) -> Vec<u32> {
            vec![0, 1]
        }
        fn prefer(&self, address: u64, len: u64, node: u32) -> std::io::Result<()> {
            self.0.lock().unwrap().push((address, len, node));
            Ok(())
        }
        fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> std::io::Result<()> {
            for (address, node) in addresses.iter().zip(nodes) {
                *node = (address / PAGE % 2) as i32;
            }
            Ok(())
        }
    }
    let _turn = turn();
    let policy = TwoNodes(Mutex::default());
    let len = 64 * PAGE;
    let mapping = Mapping::with_nodes(Backing::Anon4K, len, Some(1), &policy).unwrap();
    assert_eq!(*policy.0.lock().unwrap(), [(mapping.address(), len, 1)]);
    for cell in mapping.cells()[..10 * 512].iter().step_by(512) {
        cell.store(1, Ordering::Relaxed);
    }
    if mapping.folios().is_ok() {
        let nodes = mapping.nodes_by(&policy).unwrap();
        assert_eq!(
            nodes,
            [(None, 54 * PAGE), (Some(0), 5 * PAGE), (Some(1), 5 * PAGE)]
        );
    }
    let node = hostmem::Machine::probe().unwrap().nodes[0];
    match Mapping::new(Backing::Anon4K, PAGE, Some(node)) {
        Ok(mapping) => {
            mapping.populate(&mut on).unwrap();
            assert_eq!(mapping.nodes().unwrap(), [(Some(node), PAGE)]);
        }
        Err(error) => eprintln!("not run: {error}"),
    }
}

#[test]
fn a_pool_that_cannot_be_raised_stays_as_it_was() {
    let _turn = turn();
    let before = Pool::read(HugeSize::OneGiB);
    match RaisedPool::raise(HugeSize::OneGiB, 1 << 50) {
        Err(PoolError::MoreThanAvailable { missing, .. }) => {
            assert_eq!(
                missing,
                (1 << 50) - before.unwrap().unreserved() * (1 << 30)
            );
        }
        Err(error @ PoolError::NoSuchSize { .. }) => eprintln!("not run: {error}"),
        result => panic!("{result:?}"),
    }
    assert_eq!(Pool::read(HugeSize::OneGiB), before);
    let Some(before) = Pool::read(HugeSize::TwoMiB) else {
        return eprintln!("not run: no pool of 2M pages");
    };
    match RaisedPool::raise(HugeSize::TwoMiB, 6 * MIB) {
        Ok(first) => {
            assert!(Pool::read(HugeSize::TwoMiB).unwrap().unreserved() >= 3);
            let second = RaisedPool::raise(HugeSize::TwoMiB, 10 * MIB).unwrap();
            assert_eq!(
                first.added() + second.added(),
                5u64.saturating_sub(before.unreserved())
            );
            drop(first);
            second.restore().unwrap();
            assert_eq!(Pool::read(HugeSize::TwoMiB), Some(before));
        }
        Err(error) => eprintln!("not run: {error}"),
    }
}
