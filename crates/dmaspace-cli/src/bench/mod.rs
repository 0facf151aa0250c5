//! `dmaspace bench`: the figures of the origins on this machine, which the [`lab`] measures.

mod html;
mod program;
mod text;

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lab::bench::{Bench, BenchError, BenchReport, Group, Settings, Watch};
use serde::Serialize;

use crate::draw::sheet::Paint;
use crate::draw::terminal::progress_chars;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse, size};

use program::Program;

pub(crate) const ABOUT: &str = "Repeats the measurements of five public Linux patch series: pinning and \
    mapping real memory, mapping by many threads, a balloon, page tables of every format, and tables on \
    memory nodes (simulated). Each row has the published figures, the old method measured here (page by \
    page; for pins by page and by folio) and dmaspace measured here, in one run and in turns: median, \
    lowest and highest. The published figures are from other machines: compare ratios.\n\n\
    Uses up to 8 GiB of memory (--quick: 1 GiB); with less it reports the reduced size. As root it \
    raises the pools of huge pages during the run. Measurements that are impossible here are listed as \
    not run.\n\n\
    Exit status: 0; 1 when the machine cannot be read or an operation fails; 2 when a result cannot be \
    written; 130 when interrupted. All memory and pools are restored in any case.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
    dmaspace bench tables --quick\n  \
    dmaspace bench all --html report.html\n  \
    dmaspace bench map --json map.json && jq '.groups[].rows[] | select(.threads == 10)' map.json";

/// The options of `dmaspace bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "WHAT")]
    what: What,

    /// Take about a minute for all, with less memory and fewer rounds
    ///
    /// Without it `all` takes about ten minutes on two processors with 8 GiB; longer on a busy machine,
    /// since each figure is taken three times at least.
    ///
    /// Example: --quick
    #[arg(long)]
    quick: bool,

    /// Map this much memory in `pin`, if that much is there [default: 8G, with --quick 1G]
    ///
    /// Example: --memory 64G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,

    /// Write the figures into FILE as JSON
    ///
    /// One row for each figure. Names are stable. The file is written beside its place and moved
    /// there when it is whole.
    ///
    /// Example: --json figures.json
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write one page with tables and plots into FILE
    ///
    /// The page needs no network, and follows the browser's light or dark setting.
    ///
    /// Example: --html report.html
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The groups by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Origin 1: pin, charge and map real memory
    Pin,
    /// Origin 2: map and unmap by several threads, with invalidation
    Map,
    /// Origin 3: inflate a balloon, stage by stage
    Balloon,
    /// Origin 4: the operations of page tables, in every format
    Tables,
    /// Origin 5: a table on each memory node, simulated
    Numa,
    /// All of them
    All,
}

impl What {
    fn groups(self) -> Vec<Group> {
        match self {
            Self::Pin => vec![Group::Pin],
            Self::Map => vec![Group::Map],
            Self::Balloon => vec![Group::Balloon],
            Self::Tables => vec![Group::Tables],
            Self::Numa => vec![Group::Numa],
            Self::All => Group::ALL.into(),
        }
    }
}

/// All that was measured, and by what.
#[derive(Serialize)]
pub(crate) struct Measured {
    /// The version, and the commit where it is known.
    pub(crate) version: &'static str,
    pub(crate) commit: &'static str,
    #[serde(flatten)]
    pub(crate) report: BenchReport,
}

impl Measured {
    pub(crate) const fn new(report: BenchReport) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: match option_env!("DMASPACE_COMMIT") {
                Some(commit) => commit,
                None => "unknown",
            },
            report,
        }
    }
}

/// `dmaspace bench`.
pub(crate) fn run(args: &BenchArgs, verbose: bool) -> u8 {
    let target = |path: &Option<PathBuf>| path.as_deref().map(Target::new).transpose();
    let (json_file, html_file) = match (target(&args.json), target(&args.html)) {
        (Ok(json_file), Ok(html_file)) => (json_file, html_file),
        (Err(error), _) | (_, Err(error)) => return refuse(&error),
    };
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let mut settings = match args.quick {
        true => Settings::quick(),
        false => Settings::full(),
    };
    settings.memory_bytes = args.memory.unwrap_or(settings.memory_bytes);
    let job = Bench {
        groups: args.what.groups(),
        settings,
    };
    let bar = io::stderr().is_terminal() && !verbose;
    let (result, asked) =
        stop.shielded(|| job.run(&Program, &mut Progress::new(stop.clone(), bar)));
    let measured = match result {
        _ if asked => return fail(&BenchError::Interrupted, exit::INTERRUPTED),
        Err(error) => return fail(&error, exit::WRONG),
        Ok(report) => Measured::new(report),
    };
    let json_text = match json(&measured) {
        Ok(text) => text,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let mut status = exit::RIGHT;
    for result in [
        json_file.map_or(Ok(()), |file| file.write(&json_text, &stop)),
        html_file.map_or(Ok(()), |file| file.write(&html::page(&measured), &stop)),
        print(&text::write(&measured, Paint::for_stdout())),
    ] {
        if let Err(error) = result {
            status = refuse(&error);
        }
    }
    status
}

/// The progress bar, with the time left, and the way by which a signal reaches the bench.
struct Progress {
    stop: Stop,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(stop: Stop, bar: bool) -> Self {
        let bar = bar.then(|| {
            let style = ProgressStyle::with_template("{prefix:<8} {wide_bar:.cyan} {msg:>12}")
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars(progress_chars());
            let target = ProgressDrawTarget::stderr();
            ProgressBar::with_draw_target(Some(0), target).with_style(style)
        });
        Self { stop, bar }
    }
}

impl Watch for Progress {
    fn progress(&mut self, group: Group, done: Duration, all: Duration) -> ControlFlow<()> {
        if let Some(bar) = &self.bar {
            let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            bar.set_prefix(group.name());
            bar.set_length(millis(all));
            bar.set_position(millis(done));
            bar.set_message(left(all.saturating_sub(done)));
        }
        match self.stop.is_asked() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// How long it will take at most, unless the fewest rounds take longer.
fn left(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds < 60 => format!("{seconds} s left"),
        seconds => format!("{} min {} s left", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bench_goes_on_until_it_is_asked_to_stop() {
        for asked in [false, true] {
            let mut progress = Progress::new(Stop::for_tests(asked), true);
            let (done, all) = (Duration::from_secs(5), Duration::from_secs(100));
            let flow = progress.progress(Group::Map, done, all);
            assert_eq!(flow.is_break(), asked);
            let bar = progress.bar.as_ref().unwrap();
            assert_eq!((bar.position(), bar.length()), (5000, Some(100_000)));
            assert_eq!(bar.message(), "1 min 35 s left");
        }
        assert_eq!(left(Duration::from_millis(59_900)), "59 s left");
    }

    #[test]
    fn an_interrupted_bench_gives_no_figures() {
        let job = Bench {
            groups: What::All.groups(),
            settings: Settings::smallest(),
        };
        let ended = job.run(&Program, &mut Progress::new(Stop::for_tests(true), false));
        assert!(matches!(ended, Err(BenchError::Interrupted)), "{ended:?}");
    }
}
