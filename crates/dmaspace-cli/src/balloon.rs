//! `dmaspace balloon`: a balloon behind a socket, led by lines on standard input.
//!
//! What happens is told on stdout, a line each, or as JSON; while the balloon is on its way to a target, a
//! bar on stderr shows how far it is, where that is a terminal. A signal, or `quit`, ends it.

use std::io::{self, BufRead as _, IsTerminal as _};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use dmaspace_vhost::{BalloonJob, BalloonReport, Command, Event, Operator, StatsReport};
use hostmem::ShrinkWatch;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use virtio_balloon::BulkBit;

use crate::stop::Stop;
use crate::{exit, fail, refuse, say, size, tell_on};

pub(crate) const ABOUT: &str = "Listens on a socket for a monitor that speaks vhost-user, and is the balloon of its virtual \
     machine: the complete device of the standard, with statistics, free page reporting and hinting, \
     which gives memory back to the machine by whole runs. It goes on when the monitor leaves, and \
     takes up where it was when the same virtual machine connects again.\n\n\
     Lines on standard input lead it:\n  \
     target SIZE   have this much memory in the balloon; 0 empties it\n  \
     stats         ask the guest for statistics\n  \
     hint          have the driver hint at free pages, which are counted\n  \
     stop-hints    enough of that\n  \
     quit          end\n\
     When standard input ends, it goes on.\n\n\
     It sees the memory that the monitor shares with it, and nothing else: it must not be used for a \
     virtual machine with a passed-through device, which would go on with pages that were given back. \
     The monitor must share the guest's memory as a file (memfd, /dev/shm or hugetlbfs).\n\n\
     Exit status: 0 when a signal or `quit` ended it, or nobody reads what it tells; 1 when something broke; 2 when the socket cannot \
     be had, or what is to be told cannot be written.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     dmaspace balloon --socket /run/vm1-balloon\n  \
     dmaspace balloon --socket vm1-balloon --target 7G --stats 10\n  \
     echo target 4G | dmaspace balloon --socket vm1-balloon --json";

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct BalloonArgs {
    /// The socket on which the monitor connects
    ///
    /// It is made here and removed at the end. One that a program left behind is replaced.
    ///
    /// Example: --socket /run/vm1-balloon
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// How much memory shall be in the balloon at first [default: none]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024), of whole pages.
    ///
    /// Example: --target 7G
    #[arg(long, value_name = "SIZE", value_parser = target)]
    target: Option<u64>,

    /// Ask the guest for statistics this often, in seconds [default: only when told]
    ///
    /// Example: --stats 10
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    stats: Option<u32>,

    /// Offer messages in bulk under this feature bit [default: they are not offered]
    ///
    /// The bit is nobody's but ours: 9 to 23 or 50 to 63, the same as the driver's. A driver that
    /// does not know it is served as always.
    ///
    /// Example: --bulk-bit 23
    #[arg(long, value_name = "BIT", value_parser = bulk_bit)]
    bulk_bit: Option<BulkBit>,

    /// Tell what happens as JSON, a line each
    ///
    /// Names are stable and end in their unit: `actual_bytes`. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq 'select(.event == "balloon").actual_bytes'
    #[arg(long)]
    json: bool,
}

/// A target; unlike other sizes it may be nothing.
fn target(text: &str) -> Result<u64, size::SizeError> {
    match text.trim() {
        "0" => Ok(0),
        text => size::parse(text),
    }
}

pub(crate) fn bulk_bit(text: &str) -> Result<BulkBit, String> {
    let bit: u8 = text.parse().map_err(|_| "a bit is a number, like 23")?;
    BulkBit::new(bit).map_err(|error| error.to_string())
}

impl BalloonArgs {
    fn job(&self) -> BalloonJob {
        BalloonJob {
            socket: self.socket.clone(),
            target: self.target.unwrap_or(0),
            stats: self
                .stats
                .map(|seconds| Duration::from_secs(seconds.into())),
            bulk: self.bulk_bit,
        }
    }
}

/// The command; its exit status.
pub(crate) fn run(args: &BalloonArgs, verbose: bool) -> u8 {
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    // A monitor that makes its memory shorter ends its session, and not this program.
    if let Err(error) = ShrinkWatch::install() {
        return fail(&error, exit::WRONG);
    }
    let lines = match lines() {
        Ok(lines) => lines,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let mut terminal = Terminal {
        stop: stop.clone(),
        lines: Some(lines),
        json: args.json,
        bar: (io::stderr().is_terminal() && !verbose).then_some(None),
        said: None,
        unwritten: false,
        unheard: false,
    };
    let (done, _) = stop.shielded(|| args.job().run(&mut terminal));
    match done {
        _ if terminal.unwritten => exit::INPUT,
        Ok(_) => exit::RIGHT,
        Err(error) if error.is_input() => fail(&error, exit::INPUT),
        Err(error) => fail(&error, exit::WRONG),
    }
}

/// What comes on standard input, from a thread that ends with it or with the program.
fn lines() -> io::Result<mpsc::Receiver<String>> {
    let (sender, lines) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
    })?;
    Ok(lines)
}

/// Reads a line; what is wrong with it is a sentence.
fn parse(line: &str) -> Result<Option<Command>, String> {
    let (word, rest) = match line.trim().split_once(char::is_whitespace) {
        Some((word, rest)) => (word, rest.trim()),
        None => (line.trim(), ""),
    };
    match (word, rest) {
        ("", _) => Ok(None),
        ("target", size) => match target(size) {
            Ok(bytes) => Ok(Some(Command::Target(bytes))),
            Err(error) => Err(format!("target {size}: {error}")),
        },
        ("stats", "") => Ok(Some(Command::Stats)),
        ("hint", "") => Ok(Some(Command::Hint)),
        ("stop-hints", "") => Ok(Some(Command::StopHints)),
        ("quit", "") => Ok(Some(Command::End)),
        _ => Err(format!(
            "unknown line {line:?}: there are target SIZE, stats, hint, stop-hints and quit"
        )),
    }
}

/// Whoever sits there, or the program that does.
struct Terminal {
    stop: Stop,
    lines: Option<mpsc::Receiver<String>>,
    json: bool,
    /// The bar while it is shown; `None` where nobody would see it.
    bar: Option<Option<ProgressBar>>,
    /// Target and size of the balloon that were told last.
    said: Option<(u64, u64)>,
    /// Standard output does not take what is told.
    unwritten: bool,
    /// Nobody listens any more.
    unheard: bool,
}

impl Operator for Terminal {
    fn next(&mut self, patience: Duration) -> Option<Command> {
        let line = match &self.lines {
            _ if self.unwritten || self.unheard || self.stop.is_asked() => {
                return Some(Command::End);
            }
            Some(lines) => lines.recv_timeout(patience),
            None => {
                thread::sleep(patience);
                return None;
            }
        };
        match line.map(|line| parse(&line)) {
            Ok(Ok(command)) => command,
            Ok(Err(why)) => {
                say(&why);
                None
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.lines = None;
                None
            }
        }
    }

    fn tell(&mut self, event: &Event) {
        if let Event::Balloon(balloon) = event {
            self.show(balloon);
        }
        let line = if self.json {
            serde_json::to_string(event).ok()
        } else {
            self.sentence(event)
        };
        let Some(line) = line else { return };
        match tell_on(&(line + "\n")) {
            Ok(there) => self.unheard |= !there,
            Err(error) => {
                refuse(&error);
                self.unwritten = true;
            }
        }
    }
}

impl Terminal {
    /// The bar, for as long as the balloon is on its way.
    fn show(&mut self, balloon: &BalloonReport) {
        let Some(bar) = &mut self.bar else { return };
        let (target, actual) = (balloon.target_bytes, balloon.actual_bytes);
        if target == actual {
            if let Some(bar) = bar.take() {
                bar.finish_and_clear();
            }
            return;
        }
        let bar = bar.get_or_insert_with(new_bar);
        // Deflating goes down to the target.
        bar.set_length(target.max(actual));
        bar.set_position(actual);
    }

    /// What happened, for people; on the way to a target nothing.
    fn sentence(&mut self, event: &Event) -> Option<String> {
        Some(match event {
            Event::Listening { socket } => format!("listening on {socket}"),
            Event::Connected => "connected".into(),
            Event::Memory { bytes } => format!("memory of the guest: {}", size::bytes(*bytes)),
            Event::Negotiated { features } => format!("driver: {}", features.join(", ")),
            Event::Balloon(balloon) => {
                let now = (balloon.target_bytes, balloon.actual_bytes);
                if now.0 != now.1 || self.said == Some(now) {
                    return None;
                }
                self.said = Some(now);
                standing(balloon)
            }
            Event::Stats(stats) => statistics(stats),
            Event::HintsBegin { id } => format!("hints of command {id} begin"),
            Event::HintsEnd { hinted_bytes } => {
                format!("hints end: {} so far", size::bytes(*hinted_bytes))
            }
            Event::NotDiscarded {
                address,
                bytes,
                cause,
            } => format!(
                "not given back: {} at {address:#x}: {cause}",
                size::bytes(*bytes)
            ),
            Event::Refused { cause } => format!("refused: {cause}"),
            Event::Lost { events } => format!("and {}", size::counted(*events, "more event")),
            Event::Disconnected { cause: None } => "disconnected".into(),
            Event::Disconnected { cause: Some(cause) } => format!("disconnected: {cause}"),
            _ => return None,
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(Some(bar)) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn new_bar() -> ProgressBar {
    let template = "balloon    {wide_bar:.cyan} {binary_bytes:>11} of {binary_total_bytes}";
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("█▉▊▋▌▍▎▏ ");
    ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr()).with_style(style)
}

fn standing(balloon: &BalloonReport) -> String {
    let given = match balloon.discards {
        0 => "nothing was given back yet".into(),
        discards => format!(
            "{} were given back in {}",
            size::bytes(balloon.discarded_bytes),
            size::counted(discards, "run")
        ),
    };
    format!(
        "balloon: {}; {given}, by {}",
        size::bytes(balloon.actual_bytes),
        size::counted(balloon.messages, "message")
    )
}

fn statistics(stats: &StatsReport) -> String {
    let memory = [
        ("total", stats.total_bytes),
        ("free", stats.free_bytes),
        ("available", stats.available_bytes),
        ("caches", stats.cache_bytes),
        ("swapped in", stats.swapped_in_bytes),
        ("swapped out", stats.swapped_out_bytes),
    ];
    let counts = [
        ("major faults", stats.major_faults),
        ("minor faults", stats.minor_faults),
        ("huge pages had", stats.huge_page_allocations),
        ("huge pages refused", stats.huge_page_failures),
        ("killed for want of memory", stats.oom_kills),
    ];
    let memory = memory
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name} {}", size::bytes(value?))));
    let counts = counts
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name} {}", size::count(value?))));
    let all: Vec<_> = memory.chain(counts).collect();
    format!("guest: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lead_it() {
        for (line, command) in [
            ("target 4G", Command::Target(4 << 30)),
            ("  target   0 ", Command::Target(0)),
            ("stats", Command::Stats),
            ("hint", Command::Hint),
            ("stop-hints", Command::StopHints),
            ("quit", Command::End),
        ] {
            assert_eq!(parse(line), Ok(Some(command)), "{line}");
        }
        assert_eq!(parse(" "), Ok(None));
        for (line, why) in [
            ("target", "target : a size is a number"),
            ("target 1.5G", "target 1.5G: a size has no fraction"),
            ("target 5", "target 5: 5 bytes are no whole pages"),
            ("stats now", "unknown line \"stats now\": there are target"),
            ("inflate", "unknown line"),
        ] {
            let refusal = parse(line).unwrap_err();
            assert!(refusal.starts_with(why), "{refusal}");
        }
    }

    #[test]
    fn only_what_is_reached_is_reported_and_once() {
        let mut terminal = Terminal {
            stop: Stop::for_tests(false),
            lines: None,
            json: false,
            bar: None,
            said: None,
            unwritten: false,
            unheard: false,
        };
        let mut balloon = BalloonReport {
            target_bytes: 1 << 20,
            actual_bytes: 1 << 19,
            messages: 3,
            discarded_bytes: 1 << 20,
            discards: 1,
            ..BalloonReport::default()
        };
        assert_eq!(terminal.sentence(&Event::Balloon(balloon)), None);
        balloon.actual_bytes = balloon.target_bytes;
        let told = terminal.sentence(&Event::Balloon(balloon)).unwrap();
        assert_eq!(
            told,
            "balloon: 1 MiB; 1 MiB were given back in 1 run, by 3 messages"
        );
        balloon.reported_bytes = 7;
        assert_eq!(terminal.sentence(&Event::Balloon(balloon)), None);
    }
}
