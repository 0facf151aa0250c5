//! Rounds until the time is over, and whoever watches them.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::figure::Figure;
use super::report::{Group, GroupReport, Key, Row};
use super::{BenchError, Settings, Watch};

/// Rounds of one group: everything is measured once in each round, the ways one after the other.
pub(super) struct Rounds<'a> {
    watch: &'a mut dyn Watch,
    settings: Settings,
    group: Group,
    /// The time of all groups, and of those before this one.
    all: Duration,
    before: Duration,
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

impl<'a> Rounds<'a> {
    /// The group that is `nth` of `count`.
    pub(super) fn new(
        watch: &'a mut dyn Watch,
        settings: Settings,
        group: Group,
        nth: u32,
        count: u32,
    ) -> Self {
        let begun = Instant::now();
        Self {
            watch,
            settings,
            group,
            all: settings.budget * count,
            before: settings.budget * nth,
            begun,
            part: Part {
                ends: begun + settings.budget,
                round: begun,
                rounds: 0,
            },
            samples: Vec::new(),
        }
    }

    /// What was asked for.
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
    pub(super) fn more(&mut self) -> Result<bool, BenchError> {
        self.look()?;
        let (now, rounds) = (Instant::now(), self.part.rounds);
        let last = now - self.part.round;
        let more = rounds < self.settings.least_rounds
            || rounds < self.settings.most_rounds && now + last <= self.part.ends;
        self.part.round = now;
        self.part.rounds += u32::from(more);
        Ok(more)
    }

    /// True in the first round of a part, whose figures do not count where there is a second.
    pub(super) const fn warms(&self) -> bool {
        self.part.rounds == 1 && self.settings.least_rounds > 1
    }

    /// Tells how far it is; an error when it is to stop.
    pub(super) fn look(&mut self) -> Result<(), BenchError> {
        let done = self.before + self.begun.elapsed().min(self.settings.budget);
        match self.watch.progress(self.group, done, self.all) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(BenchError::Interrupted),
        }
    }

    /// The same for those who ask from within.
    pub(super) fn go_on(&mut self) -> ControlFlow<()> {
        match self.look() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    /// Notes a sample.
    pub(super) fn note(&mut self, key: Key, sample: f64) {
        if self.warms() {
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
    use super::*;
    use crate::bench::report::{Subject, Unit};

    struct Asked(u32, Vec<(Duration, Duration)>);

    impl Watch for Asked {
        fn progress(&mut self, _group: Group, done: Duration, all: Duration) -> ControlFlow<()> {
            self.1.push((done, all));
            self.0 -= 1;
            match self.0 {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        }
    }

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

    fn settings(least: u32, most: u32, budget: Duration) -> Settings {
        Settings {
            budget,
            least_rounds: least,
            most_rounds: most,
            ..Settings::smallest()
        }
    }

    #[test]
    fn there_are_rounds_until_there_are_enough_and_the_first_does_not_count() {
        let mut watch = Asked(100, Vec::new());
        // No time at all: the fewest; an hour: the most.
        for (budget, expected) in [(Duration::ZERO, 3), (Duration::from_secs(3600), 5)] {
            let settings = settings(3, 5, budget);
            let mut rounds = Rounds::new(&mut watch, settings, Group::Map, 1, 2);
            let mut report = GroupReport::new(Group::Map);
            let mut count = 0;
            while rounds.more().unwrap() {
                count += 1;
                rounds.note(KEY, f64::from(count));
            }
            rounds.finish(&mut report);
            assert_eq!(count, expected);
            let figure = report.rows[0].figure;
            assert_eq!((figure.min, figure.max), (2.0, f64::from(expected)));
            assert_eq!(figure.samples, expected as usize - 1);
        }
        let (done, all) = watch.1[5];
        assert_eq!(all, Duration::from_secs(7200));
        assert!(done >= Duration::from_secs(3600) && done < all);
    }

    #[test]
    fn whoever_wants_it_to_stop_is_heard() {
        let mut watch = Asked(3, Vec::new());
        let mut rounds = Rounds::new(&mut watch, settings(9, 9, Duration::ZERO), Group::Pin, 0, 1);
        assert!(rounds.more().unwrap());
        assert!(rounds.go_on().is_continue());
        assert!(matches!(rounds.more(), Err(BenchError::Interrupted)));
    }
}
