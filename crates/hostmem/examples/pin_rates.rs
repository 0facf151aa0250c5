//! Times populating, pinning, finding the runs of and unpinning memory.
//!
//!     cargo run --release -p dmaspace-hostmem --example pin_rates -- hugetlb-2m 4096 2
//!
//! Arguments: the backing, the size in MiB, the piece in MiB (a power of two from 2 to 1024), and
//! by how many workers the memory is populated (0: as many as its node has processors).
//! Pools of huge pages are raised for the time of the run. Times are of the clock and of the
//! processor; on a machine with other work only the second tells something.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Backing, FrameSource, Mapping, Pinner, Population, RaisedPool};
use runs::Span;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = |i: usize, default: &str| arguments.get(i).map_or(default, |a| a).to_owned();
    let backing: Backing = text(0, "thp").parse()?;
    let len = text(1, "1024").parse::<u64>()? << 20;
    let piece = text(2, "2").parse::<u64>()? << 20;

    let workers = NonZeroUsize::new(text(3, "0").parse()?);

    let _pool = match backing.huge_size() {
        Some(size) => Some(RaisedPool::raise(size, len)?),
        None => None,
    };
    let on = &mut |_bytes| ControlFlow::Continue(());
    let mapping = Arc::new(Mapping::new(backing, len, None)?);
    let pages = (len / 4096) as f64;
    let report = |what: &str, (start, cpu): (Instant, f64), note: String| {
        let (clock, cpu) = (start.elapsed().as_nanos() as f64, cpu_ns() - cpu);
        println!(
            "{what:<10} {:>10.3} ms {:>9.3} ns per 4 KiB; processor {:>9.3} ms {:>8.3} ns  {note}",
            clock / 1e6,
            clock / pages,
            cpu / 1e6,
            cpu / pages
        );
    };

    println!("{len} bytes of {backing}, pieces of {piece} bytes");
    let start = now();
    let mut population = Population::new([&*mapping]);
    if let Some(workers) = workers {
        population = population.workers(workers);
    }
    population.run(on)?;
    let folios = mapping.folios()?;
    report(
        "populate",
        start,
        format!("{:.1} % huge", folios.huge_share() * 100.0),
    );

    let pinner = Pinner::probe(piece)?;
    println!(
        "pinned by {} {}, charged to {}",
        pinner.kind(),
        pinner.why().unwrap_or(""),
        pinner.counter()
    );
    let start = now();
    let pin = pinner.pin(&mapping, Span::new(0, len), on)?;
    report("pin", start, format!("{:?}", pin.steps()));

    let source = FrameSource::detect(&mapping);
    let mut out = [Span::default(); 512];
    for round in 0..5 {
        let start = now();
        let mut frames = pin.runs(Span::new(0, len), source)?;
        let mut count = 0;
        loop {
            let n = frames.next_batch(&mut out)?;
            if n == 0 {
                break;
            }
            count += n;
        }
        let note = format!(
            "round {round}: {count} runs, {} entries, {source}",
            frames.entries_read()
        );
        report("find runs", start, note);
    }

    let start = now();
    let nodes = mapping.nodes()?;
    report("nodes", start, format!("{nodes:?}"));

    let start = now();
    let bytes = pin.unpin()?;
    report("unpin", start, format!("{bytes} bytes"));
    Ok(())
}

fn now() -> (Instant, f64) {
    (Instant::now(), cpu_ns())
}

/// Time of the processor that this thread has used, in nanoseconds.
fn cpu_ns() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel fills the structure it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
