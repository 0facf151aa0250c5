//! Rounds until the time is over.

use std::time::Instant;

use super::Settings;
use super::figure::Figure;
use super::report::{GroupReport, Key, Row};

/// Rounds of one group: everything is measured once in each round, the ways one after the other.
pub(super) struct Rounds {
    settings: Settings,
    begun: Instant,
    part: Part,
    samples: Vec<(Key, Vec<f64>)>,
}

/// A part of a group, which has its own share of the time.
struct Part {
    ends: Instant,
    round: Instant,
    rounds: u32,
}

impl Rounds {
    pub(super) fn new(settings: Settings) -> Self {
        let begun = Instant::now();
        Self {
            settings,
            begun,
            part: Part {
                ends: begun + settings.budget,
                round: begun,
                rounds: 0,
            },
            samples: Vec::new(),
        }
    }

    /// The sizes that were asked for.
    pub(super) const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Begins the part that is `nth` of `count`: it may go on until its share of the time is over.
    pub(super) fn part(&mut self, nth: u32, count: u32) {
        let ends = self.settings.budget * (nth + 1) / count.max(1);
        self.part = Part {
            ends: self.begun + ends,
            round: Instant::now(),
            rounds: 0,
        };
    }

    /// True when there is to be one more round: there were too few, or another one like the last
    /// will be over in time.
    pub(super) fn more(&mut self) -> bool {
        let (now, rounds) = (Instant::now(), self.part.rounds);
        let last = now - self.part.round;
        let more = rounds < self.settings.least_rounds
            || rounds < self.settings.most_rounds && now + last <= self.part.ends;
        self.part.round = now;
        self.part.rounds += u32::from(more);
        more
    }

    /// Notes a sample. The first round of a part does not count where there is a second.
    pub(super) fn note(&mut self, key: Key, sample: f64) {
        if self.part.rounds == 1 && self.settings.least_rounds > 1 {
            return;
        }
        match self.samples.iter_mut().find(|(known, _)| *known == key) {
            Some((_, samples)) => samples.push(sample),
            None => self.samples.push((key, vec![sample])),
        }
    }

    /// Puts the figures of all samples into the report.
    pub(super) fn finish(self, report: &mut GroupReport) {
        let rows = self.samples.into_iter().filter_map(|(key, samples)| {
            let figure = Figure::of(&samples)?;
            Some(Row { key, figure })
        });
        report.rows.extend(rows);
    }
}

/// The lowest time of an empty bracket of [`timed`], nanoseconds.
fn empty() -> f64 {
    static EMPTY: std::sync::OnceLock<f64> = std::sync::OnceLock::new();
    *EMPTY.get_or_init(|| {
        let one = |_| {
            let begun = Instant::now();
            std::hint::black_box(());
            begun.elapsed().as_nanos() as f64
        };
        (0..10_000).map(one).fold(f64::INFINITY, f64::min)
    })
}

/// Nanoseconds that `work` takes, less those of an empty bracket.
pub(super) fn timed(work: impl FnOnce()) -> f64 {
    let empty = empty();
    let begun = Instant::now();
    work();
    (begun.elapsed().as_nanos() as f64 - empty).max(0.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::origins::report::{Group, Subject, Unit};

    const KEY: Key = Key {
        group: Group::Map,
        op: "map",
        memory: "",
        format: "vtd-ss",
        subject: Subject::Dmaspace,
        threads: 1,
        size_bytes: 4096,
        unit: Unit::Microseconds,
    };

    #[test]
    fn there_are_rounds_until_there_are_enough_and_the_first_does_not_count() {
        // No time at all: the fewest; an hour: the most.
        for (budget, expected) in [(Duration::ZERO, 3), (Duration::from_secs(3600), 5)] {
            let mut rounds = Rounds::new(Settings {
                budget,
                least_rounds: 3,
                most_rounds: 5,
                ..Settings::smallest()
            });
            let mut report = GroupReport::new(Group::Map);
            let mut count = 0;
            while rounds.more() {
                count += 1;
                rounds.note(KEY, f64::from(count));
            }
            rounds.finish(&mut report);
            assert_eq!(count, expected);
            let figure = report.rows[0].figure;
            assert_eq!((figure.min, figure.max), (2.0, f64::from(expected)));
            assert_eq!(figure.samples, expected as usize - 1);
        }
    }
}
