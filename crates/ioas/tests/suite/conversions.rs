//! A confidential guest converts parts of its memory, thousands of times, while a device reads all the
//! rest without one fault.
//!
//! A part that becomes private is taken out, one that becomes shared again is put back. A page has a
//! turn, which is odd from just before it goes out until just after it is back: only in such a turn a
//! fault is expected. The device's memory refuses what is not pinned, so that an old translation is
//! found out. In the end leaves, tables, areas, pins and charges are what they were in the beginning.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::*;
use fastrand::Rng;
use ioas::{Ledger, Memory};
use iommu::{FaultReason, SoftwareConfig, SoftwareUnit};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use runs::{Iova, Offset, Pa, Span};

const NEVER: Interruption = Interruption::Refused;
const AT: u64 = 64 * GIB;
/// Physical start of the memory under test.
const FRAME: u64 = 256 * GIB;

fn at(part: Span<Offset>) -> Span<Iova> {
    Span::new(AT + part.start, part.len)
}

/// A part that a guest would convert: mostly pages, sometimes much more.
fn part(numbers: &mut Rng, bytes: u64) -> Span<Offset> {
    let (unit, most) = match numbers.u64(..32) {
        0 => (2 * MIB, 16),
        1..4 => (2 * MIB, 1),
        4..12 => (PAGE, 600),
        _ => (PAGE, 4),
    };
    let len = unit * (1 + numbers.u64(..most));
    let start = numbers.u64(..(bytes - len) / unit) * unit;
    Span::new(start, len)
}

const CONVERTED: u64 = 4 * GIB;

/// Takes random parts of 4 GiB out and puts them back, `conversions` times, while a device reads
/// everything that is not out.
fn convert(format: (FormatId, u8), frames: &[Span<Pa>], conversions: u64) {
    let tables = Arc::new(HeapTables::with_tables(4096).unwrap());
    let object = Arc::new(Tracked::new(frames));
    let config = SoftwareConfig {
        flush_timeout: Duration::from_secs(600),
        ..SoftwareConfig::default()
    };
    let unit = Arc::new(SoftwareUnit::with_config(
        tables.clone(),
        object.pages.clone(),
        config,
    ));
    let space = space(format.0, format.1, &tables);
    space.attach((unit.clone(), DEVICE)).unwrap();
    let ledger = Ledger::new("a counter", Some(CONVERTED), 0);
    let memory = Memory::new(object.clone(), &ledger);
    let whole = Span::new(0, CONVERTED);
    space.map(AT, &memory, whole, Prot::RW).unwrap();
    let before = State::of(&space, &ledger, &tables, &[&object.memory]);

    // Odd while a page is out, or on its way.
    let turns: Vec<AtomicU32> = (0..CONVERTED / PAGE).map(|_| AtomicU32::new(0)).collect();
    let turn = |part: Span<Offset>| {
        let pages = (part.start / PAGE) as usize..((part.start + part.len) / PAGE) as usize;
        for turn in &turns[pages] {
            turn.fetch_add(1, Ordering::SeqCst);
        }
    };
    // Offset where a conversion is under way now.
    let busy = AtomicU64::new(0);
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let of_offset: Vec<(u64, u64)> = frames
        .iter()
        .scan(0, |offset, run| {
            let here = (*offset, run.start);
            *offset += run.len;
            Some(here)
        })
        .collect();
    let frame = |offset: u64| {
        let next = of_offset.partition_point(|(first, _)| *first <= offset);
        let (first, start) = of_offset[next - 1];
        start + (offset - first)
    };
    thread::scope(|scope| {
        let device = scope.spawn(|| {
            let mut numbers = Rng::with_seed(1);
            let mut port = unit.port(DEVICE);
            while !stop.load(Ordering::Relaxed) {
                // Half of the time around the place.
                let near = busy.load(Ordering::Relaxed) + numbers.u64(..16) * PAGE;
                let offset = match numbers.u64(..2) {
                    0 => numbers.u64(..CONVERTED / PAGE) * PAGE,
                    _ => near.saturating_sub(8 * PAGE).min(CONVERTED - PAGE),
                };
                let turn = &turns[(offset / PAGE) as usize];
                let before = turn.load(Ordering::SeqCst);
                let mut word = [0];
                match port.read(AT + offset, &mut word) {
                    // An old translation, perhaps, but of memory that is pinned.
                    Ok(()) => assert_eq!(word[0], frame(offset), "{offset:#x}"),
                    Err(aborted) => {
                        let reason = aborted.fault.reason;
                        assert!(!matches!(reason, FaultReason::Target(_)), "{aborted}");
                        let moved = before % 2 == 1 || turn.load(Ordering::SeqCst) != before;
                        assert!(moved, "{aborted} at {offset:#x}, which was not out");
                    }
                }
                reads.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut numbers = Rng::with_seed(2);
        let mut out: Vec<Span<Offset>> = Vec::new();
        let mut converted = 0;
        while converted < conversions || !out.is_empty() {
            let more = converted < conversions && out.len() < 12;
            if more && (out.is_empty() || numbers.u64(..2) == 0) {
                let part = part(&mut numbers, CONVERTED);
                if out.iter().any(|other| other.overlaps(&part)) {
                    continue;
                }
                busy.store(part.start + numbers.u64(..2) * part.len, Ordering::Relaxed);
                turn(part);
                let unpinned = space.take_out(at(part), NEVER).unwrap();
                assert_eq!(unpinned, part.len);
                out.push(part);
                converted += 1;
            } else {
                let part = out.swap_remove(numbers.u64(..out.len() as u64) as usize);
                busy.store(part.start + numbers.u64(..2) * part.len, Ordering::Relaxed);
                space.put_back(at(part), NEVER).unwrap();
                turn(part);
            }
            if converted % 64 == 0 {
                let held: u64 = CONVERTED - out.iter().map(|out| out.len).sum::<u64>();
                assert_eq!((object.memory.pinned(), ledger.in_use()), (held, held));
                let seen = reads.load(Ordering::Relaxed);
                while reads.load(Ordering::Relaxed) < seen + 16 && !device.is_finished() {
                    thread::yield_now();
                }
            }
            if device.is_finished() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        device.join().unwrap();
    });
    assert_eq!(space.len(), 1);
    let after = State::of(&space, &ledger, &tables, &[&object.memory]);
    assert_eq!(after.leaves.len(), before.leaves.len());
    assert_eq!(after, before);
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
    assert_eq!((object.memory.pinned(), ledger.in_use()), (0, 0));
}

#[test]
fn conversions_of_1_gib_leaves_disturb_no_access() {
    let frames = [0, 3, 5, 9].map(|n| Span::new(FRAME + n * GIB, GIB));
    convert(FORMATS[0], &frames, 640);
}

#[test]
fn conversions_of_2_mib_leaves_disturb_no_access() {
    let frames: Vec<Span<Pa>> = (0..CONVERTED / (2 * MIB))
        .map(|n| Span::new(FRAME + n * 6 * MIB, 2 * MIB))
        .collect();
    convert(FORMATS[1], &frames, 320);
}

#[test]
fn conversions_out_of_the_largest_leaves_disturb_no_access() {
    // A format in which all of it is one leaf.
    convert(FORMATS[2], &[Span::new(FRAME, CONVERTED)], 320);
}
