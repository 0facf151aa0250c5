//! Times of memory of several sizes and backings in an address space that is empty.

use std::sync::Arc;

use hostmem::{Backing, Machine, Mapping};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use iopt::Prot;
use runs::Span;

use super::job::{Clock, timed};
use super::memory::check_free;
use super::report::{Spread, TimesReport};
use super::{CheckError, Step, Watch};

const SIZES: [u64; 4] = [64 << 10, 2 << 20, 64 << 20, 1 << 30];
/// Rounds, of which the median counts.
const ROUNDS: usize = 5;

/// Maps memory of each backing, up to `most` bytes of it, at multiples of its size from `start` on.
pub(super) fn measure(
    space: &Ioas,
    start: impl Fn(u64) -> Option<u64>,
    ledger: &Arc<Ledger>,
    host: &dyn Fn(Arc<Mapping>) -> HostMemory,
    most: u64,
    watch: &mut Watch<'_>,
) -> Result<Vec<TimesReport>, CheckError> {
    let machine = Machine::probe()?;
    let mut all = Vec::new();
    for backing in Backing::ALL {
        let sizes = SIZES
            .into_iter()
            .filter(|size| *size <= most && size % backing.page() == 0);
        for size in sizes {
            let mut report = TimesReport {
                backing: backing.name(),
                size_bytes: size,
                ..TimesReport::default()
            };
            let place = start(size).filter(|_| check_free(&machine, backing, size).is_ok());
            match place {
                Some(iova) => {
                    let mapping = Arc::new(Mapping::new(backing, size, None)?);
                    let populated = mapping.populate(&mut |_| watch(Step::Times));
                    if watch(Step::Times).is_break() {
                        return Err(CheckError::Interrupted(Step::Times));
                    }
                    populated?;
                    let memory = Memory::new(Arc::new(host(mapping)), ledger);
                    rounds(space, iova, &memory, &mut report)?;
                }
                None => report.refused = Some("not enough free memory of this kind".into()),
            }
            all.push(report);
        }
    }
    Ok(all)
}

fn rounds(
    space: &Ioas,
    iova: u64,
    memory: &Arc<Memory>,
    report: &mut TimesReport,
) -> Result<(), CheckError> {
    let whole = Span::new(0, memory.len());
    let (mut pins, mut maps, mut unmaps) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut clock = Clock::new(Step::Times, None);
        let (mapped, ns) = timed(|| space.map(iova, memory, whole, Prot::RW, &mut clock));
        if let Err(error) = mapped {
            report.refused = Some(without_addresses(&crate::sentence(&error)));
            return Ok(());
        }
        let pin = clock.spent(&[ioas::Step::Charge, ioas::Step::Pin]);
        let (unmapped, unmap) = timed(|| space.unmap(Span::new(iova, whole.len), &mut ()));
        unmapped.map_err(CheckError::Unmap)?;
        pins.push(pin as f64);
        maps.push(ns.saturating_sub(pin) as f64);
        unmaps.push(unmap as f64);
    }
    let median = |samples| Spread::of(samples).median as u64;
    (report.pin_ns, report.map_ns) = (median(pins), median(maps));
    report.unmap_ns = median(unmaps);
    Ok(())
}

/// A sentence whose words in hexadecimal are left out.
fn without_addresses(sentence: &str) -> String {
    let words = sentence.split(' ');
    let shown: Vec<_> = words
        .map(|word| if word.contains("0x") { "…" } else { word })
        .collect();
    shown.join(" ")
}
