//! `dmaspace balloon`: a balloon behind a socket, led by lines on standard input.
//!
//! Events are printed on stdout, a line each, or as JSON; while the balloon is on its way to a target, a
//! bar on stderr shows how far it is, where that is a terminal. A signal, or `quit`, ends it.

use std::io::{self, BufRead, BufReader, IsTerminal as _, Read};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use dmaspace::vhost::{BackendEvent, BalloonJob, BalloonReport, Command, Operator, StatsReport};
use hostmem::ShrinkWatch;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use virtio_balloon::BulkBit;

use crate::draw::terminal::progress_chars;
use crate::json::json_line;
use crate::output::{exit, fail, refuse, say, tell_on};
use crate::size;
use crate::stop::Stop;

/// The longest line of standard input, bytes; a command has some twenty.
const MOST_LINE: u64 = 4096;
/// Lines that are read before they are wanted.
const LINES_AHEAD: usize = 16;

pub(crate) const ABOUT: &str = "Provides a virtio balloon to a monitor over vhost-user: the complete device of the standard, with \
     statistics, free page reporting and hinting. It discards guest memory in runs. It keeps running when \
     the monitor disconnects, and continues when the same virtual machine connects again.\n\n\
     Commands on standard input:\n  \
     target SIZE   set the size of the balloon; 0 empties it\n  \
     stats         request statistics from the guest\n  \
     hint          request hints about free pages, which are counted\n  \
     stop-hints    end hinting\n  \
     quit          exit\n\
     It keeps running after the end of standard input.\n\n\
     Do not use it for a virtual machine with a passed-through device: this program cannot make the device \
     release memory, so the device would keep using pages that were discarded. The monitor must share the guest's \
     memory as a file (memfd, /dev/shm or hugetlbfs).\n\n\
     Exit status: 0 after a signal or `quit`, or when standard output was closed; 1 after a failure; 2 when \
     the socket cannot be created, or output cannot be written.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     dmaspace balloon --socket /run/vm1-balloon\n  \
     dmaspace balloon --socket vm1-balloon --target 7G --stats 10\n  \
     echo target 4G | dmaspace balloon --socket vm1-balloon --json";

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct BalloonArgs {
    /// Socket to which the monitor connects
    ///
    /// Created at the start and removed at the end. A socket that no program listens on is replaced.
    ///
    /// Example: --socket /run/vm1-balloon
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// Size of the balloon at the start [default: 0]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024), of whole pages.
    ///
    /// Example: --target 7G
    #[arg(long, value_name = "SIZE", value_parser = target)]
    target: Option<u64>,

    /// Request statistics from the guest at this interval, in seconds [default: never]
    ///
    /// Example: --stats 10
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    stats: Option<u32>,

    /// Offer messages in bulk under this feature bit [default: they are not offered]
    ///
    /// The bit is not part of the standard: 9 to 23 or 50 to 63, and the same for the driver. Drivers that do not
    /// know it use the standard messages.
    ///
    /// Example: --bulk-bit 23
    #[arg(long, value_name = "BIT", value_parser = bulk_bit)]
    bulk_bit: Option<BulkBit>,

    /// Do not offer free page reporting
    ///
    /// The host then gets free memory back only by inflating the balloon.
    ///
    /// Example: --no-reporting
    #[arg(long)]
    no_reporting: bool,

    /// Print events as JSON, one per line
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
            reporting: !self.no_reporting,
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
    let lines = match lines(io::stdin()) {
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

/// Lines of standard input, or what is wrong with one, from a thread that ends with it or with the program.
fn lines(input: impl Read + Send + 'static) -> io::Result<mpsc::Receiver<Line>> {
    let (sender, lines) = mpsc::sync_channel(LINES_AHEAD);
    thread::Builder::new().spawn(move || {
        let mut input = BufReader::new(input);
        while let Some(line) = next_line(&mut input) {
            // Nothing behind a line without an end is a line.
            let last = line.is_err();
            if sender.send(line).is_err() || last {
                break;
            }
        }
    })?;
    Ok(lines)
}

type Line = Result<String, String>;

/// The next line; none at the end, or when there are no more to be had.
fn next_line(input: &mut impl BufRead) -> Option<Line> {
    let mut line = Vec::new();
    let read = input.take(MOST_LINE + 1).read_until(b'\n', &mut line);
    if read.ok()? == 0 {
        return None;
    }
    if line.len() as u64 > MOST_LINE {
        let why =
            format!("a line of standard input has more than {MOST_LINE} bytes: no more are read");
        return Some(Err(why));
    }
    Some(Ok(String::from_utf8_lossy(&line).into_owned()))
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

/// The user's side: a terminal, or a program behind pipes.
struct Terminal {
    stop: Stop,
    lines: Option<mpsc::Receiver<Line>>,
    json: bool,
    /// The bar while it is shown; `None` where it would not be seen.
    bar: Option<Option<ProgressBar>>,
    /// Target and size of the balloon that were told last.
    said: Option<(u64, u64)>,
    /// Standard output takes no more lines.
    unwritten: bool,
    /// The reader of standard output has left.
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
        match line.map(|line| line.and_then(|line| parse(&line))) {
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

    fn tell(&mut self, event: &BackendEvent) {
        if let BackendEvent::Balloon(balloon) = event {
            self.show(balloon);
        }
        let line = if self.json {
            json_line(event).ok()
        } else {
            self.sentence(event).map(|line| line + "\n")
        };
        let Some(line) = line else { return };
        match tell_on(&line) {
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

    /// Returns an event as a sentence for people; none while the balloon is on its way to a target.
    fn sentence(&mut self, event: &BackendEvent) -> Option<String> {
        Some(match event {
            BackendEvent::Listening { socket } => format!("listening on {socket}"),
            BackendEvent::Connected => "connected".into(),
            BackendEvent::Memory { bytes } => {
                format!("memory of the guest: {}", size::bytes(*bytes))
            }
            BackendEvent::Negotiated { features } => format!("driver: {}", features.join(", ")),
            BackendEvent::Balloon(balloon) => {
                let now = (balloon.target_bytes, balloon.actual_bytes);
                if now.0 != now.1 || self.said == Some(now) {
                    return None;
                }
                self.said = Some(now);
                standing(balloon)
            }
            BackendEvent::Stats(stats) => statistics(stats),
            BackendEvent::HintsBegin { id } => format!("hints of command {id} begin"),
            BackendEvent::HintsEnd { hinted_bytes } => {
                format!("hints end: {} so far", size::bytes(*hinted_bytes))
            }
            BackendEvent::NotDiscarded {
                address,
                bytes,
                cause,
            } => format!(
                "not given back: {} at {address:#x}: {cause}",
                size::bytes(*bytes)
            ),
            BackendEvent::Refused { cause } => format!("refused: {cause}"),
            BackendEvent::Lost { events } => {
                format!("and {}", size::counted(*events, "more event"))
            }
            BackendEvent::Disconnected { cause: None } => "disconnected".into(),
            BackendEvent::Disconnected { cause: Some(cause) } => format!("disconnected: {cause}"),
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
        .progress_chars(progress_chars());
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
        ("killed by out-of-memory", stats.oom_kills),
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
    fn a_line_has_a_limit_and_an_end() {
        let long = "x".repeat(4096);
        let text = format!("stats\nh\u{e4}\n{long}\n{long}x\nquit\n");
        let mut bytes = text.into_bytes();
        bytes.retain(|byte| *byte != 0xa4);
        let lines = lines(io::Cursor::new(bytes)).unwrap();
        let lines: Vec<_> = lines.iter().collect();
        let why = "a line of standard input has more than 4096 bytes: no more are read";
        let expected = [
            Ok("stats\n".into()),
            Ok("h\u{fffd}\n".into()),
            Err(why.into()),
        ];
        // The newline belongs to it.
        assert_eq!(lines, expected);
        let endless = super::lines(io::repeat(b'a')).unwrap();
        assert_eq!(endless.iter().collect::<Vec<_>>(), [Err(why.to_owned())]);
    }

    /// Input that counts its lines, of which no reader wants more than it has room for.
    struct Lines(Arc<AtomicUsize>);

    impl Read for Lines {
        fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
            self.0.fetch_add(1, Ordering::SeqCst);
            room[..6].copy_from_slice(b"stats\n");
            Ok(6)
        }
    }

    #[test]
    fn lines_that_are_not_wanted_yet_stay_where_they_are() {
        let read = Arc::new(AtomicUsize::new(0));
        let lines = lines(Lines(Arc::clone(&read))).unwrap();
        for taken in 0..2000 {
            // One more waits to be handed on, and one is being read.
            let most = taken + LINES_AHEAD + 2;
            let found = read.load(Ordering::SeqCst);
            assert!(found <= most, "{found} lines, {most} at most");
            assert_eq!(lines.recv().unwrap(), Ok("stats\n".into()));
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
        assert_eq!(terminal.sentence(&BackendEvent::Balloon(balloon)), None);
        balloon.actual_bytes = balloon.target_bytes;
        let told = terminal.sentence(&BackendEvent::Balloon(balloon)).unwrap();
        assert_eq!(
            told,
            "balloon: 1 MiB; 1 MiB were given back in 1 run, by 3 messages"
        );
        balloon.reported_bytes = 7;
        assert_eq!(terminal.sentence(&BackendEvent::Balloon(balloon)), None);
    }
}
