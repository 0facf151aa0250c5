//! The third origin's table, with kernels: a balloon is inflated and deflated by Linux's driver and by ours.
//!
//! Four ways, from what the origin began with to what it wished for: Linux's driver and a device that makes a call for
//! each page, as monitors have it; Linux's driver and our device; our driver by page numbers; our driver in bulk. Each
//! round boots a guest for each of them, one after the other, has it use all of its memory once, so that the host
//! holds pages to give back, and inflates and deflates.
//!
//! The time is the device's: from the new target until the driver says that it is reached. Of ours, the driver's
//! clocks tell how much of it the kernel took to allocate, and how much passed between messages and answers; the
//! device's clocks how much of that it worked, and discarded.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::checks::{self, Balloon, MIB};
use crate::daemon::Daemon;
use crate::guest::{Attached, Driver, Guest, Parts};
use crate::page_by_page::PageByPage;

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// MiB of each guest.
    pub guest: u32,
    /// MiB of the balloon.
    pub balloon: u32,
    /// How often.
    pub rounds: usize,
    /// Every other page of the guest is in use, and the balloon takes what is left.
    pub scattered: bool,
}

/// Device and driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    PageByPage,
    Ours(Driver),
}

impl Way {
    const ALL: [Self; 4] = [
        Self::PageByPage,
        Self::Ours(Driver::Stock),
        Self::Ours(Driver::Pages),
        Self::Ours(Driver::Bulk),
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::PageByPage => "Linux's driver, a call a page",
            Self::Ours(driver) => driver.name(),
        }
    }
}

/// Times of one inflate or deflate.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    total: Duration,
    /// Time in the guest's kernel, without waiting for answers; where the driver tells.
    kernel: Option<Duration>,
    /// From messages to answers, without the device's work.
    send: Option<Duration>,
    /// Time of the device's work, without the discards.
    translate: Duration,
    discard: Duration,
    messages: u64,
    discards: u64,
}

impl Bench {
    /// Times all, and prints medians.
    ///
    /// # Errors
    ///
    /// When a guest fails.
    pub fn run(&self, parts: &Parts, program: &Path) -> anyhow::Result<()> {
        ensure!(
            self.rounds > 0 && self.balloon > 0 && self.balloon + 128 <= self.guest,
            "a round and more, and a balloon that leaves the guest 128 MiB"
        );
        let mut inflated = Way::ALL.map(|_| Vec::new());
        let mut deflated = Way::ALL.map(|_| Vec::new());
        let mut bytes = 0;
        for _ in 0..self.rounds {
            for (nr, way) in Way::ALL.into_iter().enumerate() {
                let (held, times) = match way {
                    Way::PageByPage => {
                        let (mut guest, mut device) = PageByPage::boot(parts, self.guest)?;
                        self.round(&mut guest, &mut device, Driver::Stock)?
                    }
                    Way::Ours(driver) => {
                        let directory = tempfile::tempdir()?;
                        let socket = directory.path().join("socket");
                        let mut daemon = Daemon::start(program, &socket, &["--no-reporting"])?;
                        let mut guest =
                            Guest::boot(parts, self.guest, Attached::VhostUser(&socket), &[])?;
                        self.round(&mut guest, &mut daemon, driver)?
                    }
                };
                bytes = held;
                if let (Some(inflate), Some(deflate)) = (inflated.get_mut(nr), deflated.get_mut(nr))
                {
                    inflate.push(times[0]);
                    deflate.push(times[1]);
                }
            }
        }
        println!(
            "{} MiB of a guest of {} MiB{}, rounds: {}; medians in ms (lowest to highest)",
            bytes / MIB,
            self.guest,
            if self.scattered {
                ", every other page in use"
            } else {
                ""
            },
            self.rounds
        );
        for (what, all) in [("inflate", inflated), ("deflate", deflated)] {
            println!(
                "\n{what:<30} {:>20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
                "total", "kernel", "send", "translate", "discard", "messages", "calls"
            );
            for (way, times) in Way::ALL.into_iter().zip(all) {
                print(way.name(), &times);
            }
        }
        Ok(())
    }

    /// The bytes of the balloon, and what inflating and deflating took.
    fn round(
        &self,
        guest: &mut Guest,
        device: &mut impl Timed,
        driver: Driver,
    ) -> anyhow::Result<(u64, [Times; 2])> {
        checks::load(guest, driver)?;
        checks::prepare(guest)?;
        checks::touch(guest)?;
        let mut bytes = u64::from(self.balloon) * MIB;
        if self.scattered {
            checks::scatter(guest)?;
            let free = checks::free(guest)?.saturating_sub(64 * MIB);
            bytes = bytes.min(free & !(MIB - 1));
        }
        let clocks = Clocks { driver };
        let inflate = clocks.time(guest, device, bytes)?;
        let deflate = clocks.time(guest, device, 0)?;
        Ok((bytes, [inflate, deflate]))
    }
}

/// A balloon that tells what its last target took.
pub trait Timed: Balloon {
    /// From the target until it was reached.
    ///
    /// # Errors
    ///
    /// When the device has gone.
    fn reached(&mut self) -> anyhow::Result<Duration>;

    /// Work of the device so far, that part of it which was discards, messages, and calls that discard.
    ///
    /// # Errors
    ///
    /// When the device has gone.
    fn work(&mut self) -> anyhow::Result<(Duration, Duration, u64, u64)>;
}

impl Timed for Daemon {
    fn reached(&mut self) -> anyhow::Result<Duration> {
        Ok(Duration::from_nanos(self.count("reached_ns")?))
    }

    fn work(&mut self) -> anyhow::Result<(Duration, Duration, u64, u64)> {
        let busy = Duration::from_nanos(self.count("busy_ns")?);
        let discarding = Duration::from_nanos(self.count("discarding_ns")?);
        Ok((
            busy,
            discarding,
            self.count("messages")?,
            self.count("discards")?,
        ))
    }
}

struct Clocks {
    driver: Driver,
}

impl Clocks {
    fn time(
        &self,
        guest: &mut Guest,
        device: &mut impl Timed,
        bytes: u64,
    ) -> anyhow::Result<Times> {
        let (busy, discarding, messages, discards) = device.work()?;
        let before = self.driver(guest)?;
        device.reach(bytes)?;
        let after = self.driver(guest)?;
        let total = device.reached()?;
        let work = device.work()?;
        let (busy, discard) = (work.0 - busy, work.1 - discarding);
        let driver = after.zip(before);
        let answer = driver.map(|(after, before)| after.1 - before.1);
        let follow = driver.map(|(after, before)| after.0 - before.0);
        Ok(Times {
            total,
            kernel: follow
                .zip(answer)
                .map(|(follow, answer)| follow.saturating_sub(answer)),
            send: answer.map(|answer| answer.saturating_sub(busy)),
            translate: busy.saturating_sub(discard),
            discard,
            messages: work.2 - messages,
            discards: work.3 - discards,
        })
    }

    /// Time of our driver's work so far, and the part of it between messages and answers.
    fn driver(&self, guest: &mut Guest) -> anyhow::Result<Option<(Duration, Duration)>> {
        if self.driver == Driver::Stock {
            return Ok(None);
        }
        let said =
            guest.run("cd /sys/bus/virtio/devices/virtio0 && echo $(cat follow_ns answer_ns)")?;
        let mut numbers = said.split_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next().context("a clock is missing");
        let (follow, answer) = (next()??, next()??);
        Ok(Some((
            Duration::from_nanos(follow),
            Duration::from_nanos(answer),
        )))
    }
}

fn print(name: &str, times: &[Times]) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let sorted = |of: &dyn Fn(&Times) -> Option<Duration>| {
        let mut all: Vec<_> = times.iter().filter_map(of).collect();
        all.sort_unstable();
        all
    };
    let median = |of: &dyn Fn(&Times) -> Option<Duration>| {
        let all = sorted(of);
        let middle = all.get(all.len() / 2);
        middle.map_or_else(|| "-".to_owned(), |time| format!("{:.1}", ms(*time)))
    };
    let totals = sorted(&|times| Some(times.total));
    let ends = |time: Option<&Duration>| time.map_or(0.0, |time| ms(*time));
    let last = times.last().copied().unwrap_or_default();
    println!(
        "  {name:<28} {:>8} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        median(&|times| Some(times.total)),
        format!("{:.0}-{:.0}", ends(totals.first()), ends(totals.last())),
        median(&|times| times.kernel),
        median(&|times| times.send),
        median(&|times| Some(times.translate)),
        median(&|times| Some(times.discard)),
        last.messages,
        last.discards,
    );
}
