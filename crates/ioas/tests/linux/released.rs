//! Memory of this machine goes through a balloon: unpinned, discarded, pinned again.

#![allow(unsafe_code)]

use runs::Offset;
use std::ops::ControlFlow;

use iopt::Interruption;

use super::*;

/// As the balloon's device discards private memory.
fn discard(mapping: &Mapping, part: Span<Offset>) {
    let start = (mapping.address() + part.start) as *mut libc::c_void;
    // SAFETY: a part of the mapping, which is accessed by atomic cells only; its words change.
    let done = unsafe { libc::madvise(start, part.len as usize, libc::MADV_DONTNEED) };
    assert_eq!(done, 0);
}

/// Returns true if every leaf leads to the page that this process has there now.
fn same_pages(space: &Ioas) -> bool {
    let mut at = AT;
    runs_of(space, Span::new(AT, BYTES)).into_iter().all(|run| {
        let mut pages = (0..run.len).step_by(4096);
        let same = pages.all(|page| space.translate(at + page) == Some(run.start + page));
        at += run.len;
        same
    })
}

#[test]
fn memory_of_the_machine_is_unpinned_while_it_is_released() {
    let _turn = alone();
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    if pinner.room().unwrap().is_some_and(|room| room < BYTES) {
        eprintln!("SKIPPED: too little may be locked here");
        return;
    }
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, BYTES, None).unwrap());
    mapping
        .populate(&mut |_| ControlFlow::Continue(()))
        .unwrap();
    let fill = |value: u64| {
        for (n, cell) in (0..).zip(mapping.cells()) {
            cell.store(value + n, Ordering::Relaxed);
        }
    };
    fill(1);
    let frames = FrameSource::detect(&mapping);
    let real = frames.is_real();
    let object = HostMemory::with_pinner(mapping.clone(), pinner.clone(), frames);
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    let memory = Memory::new(Arc::new(object), &ledger);
    let (space, tables) = space();
    let before = counted(&pinner);
    let whole = Span::new(0, BYTES);
    space.map(AT, &memory, whole, Prot::RW).unwrap();

    let runs = [Span::new(AT + MIB, MIB), Span::new(AT + 3 * MIB, 5 * 4096)];
    let bytes: u64 = runs.iter().map(|run| run.len).sum();
    let kept = &mut |range, cause| unreachable!("{range}: {cause}");
    let unpinned = space.release(&runs, Interruption::Refused, kept);
    assert_eq!(unpinned, bytes);
    assert_eq!(counted(&pinner), before + BYTES - bytes);
    assert_eq!(ledger.in_use(), BYTES);
    for run in runs {
        discard(&mapping, Span::new(run.start - AT, run.len));
    }
    assert_eq!(
        mapping.cells()[(MIB / 8) as usize].load(Ordering::Relaxed),
        0
    );
    fill(2);
    let failed = &mut |range, cause| unreachable!("{range}: {cause}");
    space.restore(&runs, Interruption::Refused, failed);
    assert_eq!(counted(&pinner), before + BYTES);
    if real {
        assert!(same_pages(&space));
        // Discarded behind the devices' back, they keep old pages.
        discard(&mapping, Span::new(0, MIB));
        fill(3);
        assert!(!same_pages(&space));
    } else {
        eprintln!("NOT LOOKED AT: whether devices reach the new pages; frames are hidden");
    }
    space.close().unwrap();
    assert_eq!((counted(&pinner), ledger.in_use()), (before, 0));
    assert_eq!(tables.in_use(), 0);
}
