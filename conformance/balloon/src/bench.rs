//! Our device beside one that gives back page by page: the same inflate of the same stock guest.
//!
//! Both guests run at the same time and take turns, round by round. Before each round the guest uses all
//! its memory once, so that there are pages to give back. What is timed begins with the new target and
//! ends when the driver says that it is reached; ours tells so up to 20 ms late, since it looks that often.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::checks::{self, Balloon, MIB};
use crate::daemon::Daemon;
use crate::guest::{Driver, Guest, Parts};
use crate::page_by_page::PageByPage;

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// MiB of each guest.
    pub guest: u32,
    /// MiB of the balloon.
    pub balloon: u32,
    /// How often.
    pub rounds: usize,
}

impl Bench {
    /// Times both, and prints medians.
    ///
    /// # Errors
    ///
    /// When a guest fails.
    pub fn run(&self, parts: &Parts, program: &Path) -> anyhow::Result<()> {
        ensure!(
            self.rounds > 0 && self.balloon > 0 && self.balloon + 128 <= self.guest,
            "a round and more, and a balloon that leaves the guest 128 MiB"
        );
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut ours = Daemon::start(program, &socket)?;
        let mut our_guest = Guest::boot(parts, self.guest, &socket, &[])?;
        let (mut their_guest, mut theirs) = PageByPage::boot(parts, self.guest)?;
        for guest in [&mut our_guest, &mut their_guest] {
            checks::prepare(guest, Driver::Stock)?;
        }
        let (mut our_times, mut their_times) = (Times::default(), Times::default());
        for _ in 0..self.rounds {
            self.round(&mut our_guest, &mut ours, &mut our_times)?;
            self.round(&mut their_guest, &mut theirs, &mut their_times)?;
        }
        let discards = ours.count("discards")? / self.rounds as u64;
        let pages = theirs.counts().1 / self.rounds as u64;
        println!(
            "{} MiB of a guest of {} MiB, {} rounds, medians (lowest to highest)",
            self.balloon, self.guest, self.rounds
        );
        our_times.print("ours, by runs", discards);
        their_times.print("page by page", pages);
        Ok(())
    }

    fn round(
        &self,
        guest: &mut Guest,
        balloon: &mut impl Balloon,
        times: &mut Times,
    ) -> anyhow::Result<()> {
        let bytes = u64::from(self.balloon) * MIB;
        checks::touch(guest)?;
        let start = Instant::now();
        balloon.reach(bytes)?;
        times.inflate.push(start.elapsed());
        let start = Instant::now();
        balloon.reach(0)?;
        times.deflate.push(start.elapsed());
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Times {
    inflate: Vec<Duration>,
    deflate: Vec<Duration>,
}

impl Times {
    fn print(&mut self, name: &str, calls: u64) {
        let inflate = figures(&mut self.inflate);
        let deflate = figures(&mut self.deflate);
        println!("  {name:<14} inflate {inflate}, about {calls} calls; deflate {deflate}");
    }
}

/// The median, the lowest and the highest.
fn figures(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let ms = |nth: usize| times.get(nth).map_or(0, Duration::as_millis);
    let last = times.len().saturating_sub(1);
    format!("{} ms ({} to {})", ms(last / 2), ms(0), ms(last))
}
