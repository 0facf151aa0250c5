//! Memory goes through a balloon: what releasing and restoring costs an address space.
//!
//! Tables of ours with a device that translates through them; the memory costs nothing to pin, so
//! that what is measured is areas, accounts, tables and the flush. Each case is run three times in an
//! address space of its own, and the fastest counts: milliseconds, and nanoseconds for one run.
//! `cargo bench -p dmaspace-ioas --bench release`; without `--bench` (as `cargo test --benches` runs
//! it) a sixteenth of the memory.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ioas::{Cause, Ioas, Ledger, Memory, MemoryObject, PinFailed, Pinned, RunReader};
use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit};
use iopt::{AnyTable, FormatId, HeapTables, Interruption, Prot};
use runs::{Iova, Offset, Pa, PageSizes, Span};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const AT: u64 = 1 << 40;
const FRAME: u64 = 1 << 36;

struct Case {
    name: &'static str,
    /// Bytes of memory, in frames that lie together in so many bytes.
    bytes: u64,
    frames: u64,
    /// Runs of so many bytes go, each the first of so many bytes.
    run: u64,
    of: u64,
    /// So many runs a call.
    batch: usize,
}

/// Frames that need no pins.
#[derive(Clone, Debug)]
struct Free {
    len: u64,
    /// Half of the frames lie apart, so that no leaf is larger than so many bytes.
    frames: u64,
    /// Of a pin, what is left of it.
    left: u64,
}

impl MemoryObject for Free {
    fn len(&self) -> u64 {
        self.len
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        part: Span<Offset>,
        _: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let left = part.len;
        Ok(Box::new(Self {
            left,
            ..self.clone()
        }))
    }
}

impl Pinned for Free {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        Ok(Box::new(Reader(part, self.frames)))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.left -= part.len;
        Ok(self.left)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.left)
    }
}

struct Reader(Span<Offset>, u64);

impl RunReader for Reader {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let Self(rest, frames) = self;
        let mut count = 0;
        while count < out.len() && !rest.is_empty() {
            let (frame, inside) = (rest.start / *frames, rest.start % *frames);
            let len = rest.len.min(*frames - inside);
            out[count] = Span::new(FRAME + 2 * frame * *frames + inside, len);
            *rest = Span::new(rest.start + len, rest.len - len);
            count += 1;
        }
        Ok(count)
    }
}

fn measure(case: &Case) -> (Duration, Duration, usize) {
    let object = Free {
        len: case.bytes,
        frames: case.frames,
        left: 0,
    };
    let tables = Arc::new(HeapTables::with_tables(65_536).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    let space = Ioas::new(DomainId(1), table);
    let none = RunMap::<Vec<AtomicU64>>::new([]).unwrap();
    let unit = Arc::new(SoftwareUnit::new(tables, none));
    space.attach((unit, DeviceId::pci(0, 5, 0))).unwrap();
    let ledger = Ledger::new("a counter", Some(case.bytes), 0);
    let memory = Memory::new(Arc::new(object), &ledger);
    let whole = Span::new(0, case.bytes);
    space.map(AT, &memory, whole, Prot::RW, &mut ()).unwrap();
    let runs: Vec<Span<Iova>> = (0..case.bytes / case.of)
        .map(|n| Span::new(AT + n * case.of, case.run))
        .collect();
    let never = Interruption::Refused;
    let begin = Instant::now();
    for batch in runs.chunks(case.batch) {
        let kept = &mut |range, cause| unreachable!("{range}: {cause}");
        space.release(batch, never, kept, &mut ());
    }
    let released = begin.elapsed();
    assert_eq!(memory.reserved(), runs.len() as u64 * case.run);
    let begin = Instant::now();
    for batch in runs.chunks(case.batch) {
        let failed = &mut |range, cause| unreachable!("{range}: {cause}");
        space.restore(batch, never, failed, &mut ());
    }
    let restored = begin.elapsed();
    assert_eq!((memory.reserved(), space.len()), (0, 1));
    space.close().unwrap();
    (released, restored, runs.len())
}

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let share = if full { 1 } else { 16 };
    let case = |name, bytes: u64, frames, run, of, batch| Case {
        name,
        bytes: bytes / share / frames * frames,
        frames: u64::min(frames, bytes / share),
        run,
        of,
        batch,
    };
    let cases = [
        case(
            "7 GiB in one run, 2M leaves",
            7 * GIB,
            2 * MIB,
            7 * GIB / share,
            7 * GIB / share,
            1,
        ),
        case(
            "7 GiB in runs of 2M, 2M leaves",
            7 * GIB,
            2 * MIB,
            2 * MIB,
            2 * MIB,
            4096,
        ),
        case(
            "7 GiB in runs of 2M, one a call",
            7 * GIB,
            2 * MIB,
            2 * MIB,
            2 * MIB,
            1,
        ),
        case(
            "7 GiB in runs of 2M, 64M leaves",
            7 * GIB,
            64 * MIB,
            2 * MIB,
            2 * MIB,
            4096,
        ),
        case(
            "every second page of 512 MiB, 2M leaves",
            GIB / 2,
            2 * MIB,
            4096,
            8192,
            4096,
        ),
    ];
    println!(
        "{:<42} {:>8} {:>12} {:>12}",
        "", "runs", "release", "restore"
    );
    for case in cases {
        let all = (0..3).map(|_| measure(&case));
        let best = all.reduce(|one, two| (one.0.min(two.0), one.1.min(two.1), one.2));
        let (released, restored, runs) = best.unwrap();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let each = |time: Duration| time.as_nanos() as u64 / runs as u64;
        println!(
            "{:<42} {runs:>8} {:>9.3} ms {:>9.3} ms {:>8} ns {:>8} ns a run",
            case.name,
            ms(released),
            ms(restored),
            each(released),
            each(restored)
        );
    }
}
