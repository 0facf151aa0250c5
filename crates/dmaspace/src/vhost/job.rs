//! The job: front ends come one after the other, and the operator sets targets meanwhile.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::PeerEvent;
use virtio_balloon::device::{BalloonSettings, BalloonSetupError, Bulk, GuestDiscardError};
use virtio_balloon::{BulkBit, Features};

use super::device::{Balloon, NoDevices, Standing};
use super::event::{BackendEvent, BalloonReport};
use super::link::{Link, LinkError};
use super::socket::Socket;

/// Period of the loop.
const TICK: Duration = Duration::from_millis(20);
/// Period after a link that has just begun: a link takes about twice as long as it lasts, however short that is.
const SOON: Duration = Duration::from_millis(1);

/// A balloon for monitors that speak vhost-user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalloonJob {
    /// Socket for front ends. A socket without a listener is replaced.
    pub socket: PathBuf,
    /// Bytes wanted in the balloon at first.
    pub target: u64,
    /// Period of requests for statistics; `None` without such requests.
    pub stats: Option<Duration>,
    /// The feature bit of messages in bulk, if they are offered.
    pub bulk: Option<BulkBit>,
    /// Free page reporting is offered.
    pub reporting: bool,
}

/// Request to a balloon that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Have this many bytes in it.
    Target(u64),
    /// Ask the guest for statistics.
    Stats,
    /// Have the driver hint at free pages.
    Hint,
    /// Enough of that.
    StopHints,
    /// Come to an end.
    End,
}

/// Owner of a balloon that runs.
pub trait Operator {
    /// The next command; `None` when there is none for `patience`.
    fn next(&mut self, patience: Duration) -> Option<Command>;

    /// Something happened.
    fn tell(&mut self, event: &BackendEvent);
}

/// Failure to start a balloon.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BalloonError {
    /// Another process listens there, or it is something else than a socket.
    #[error("{path} is {what}")]
    Taken {
        /// The path.
        path: String,
        /// Kind of thing at the path.
        what: &'static str,
    },
    /// There can be no socket.
    #[error("cannot listen on {path}")]
    Listen {
        /// The path.
        path: String,
        /// Cause.
        source: io::Error,
    },
    /// Connections fail for good, and not for want of descriptors or memory, which is waited out.
    #[error("cannot accept front ends")]
    Accept(#[source] io::Error),
    /// Drivers cannot be notified.
    #[error("cannot raise events (io_setup)")]
    Events(#[source] io::Error),
    /// The device cannot be made.
    #[error("cannot make the device")]
    Setup(#[from] BalloonSetupError),
    /// Memory cannot be given back.
    #[error("cannot give memory back")]
    Discard(#[from] GuestDiscardError),
}

impl BalloonError {
    /// True when another socket could do.
    pub const fn is_input(&self) -> bool {
        matches!(self, Self::Taken { .. } | Self::Listen { .. })
    }
}

impl BalloonJob {
    /// Serves front ends until the operator ends it. Where the balloon stood then.
    ///
    /// # Errors
    ///
    /// [`BalloonError`].
    pub fn run(&self, operator: &mut dyn Operator) -> Result<BalloonReport, BalloonError> {
        let features = BalloonSettings::default()
            .features
            .with(Features::FREE_PAGE_HINT);
        let settings = BalloonSettings {
            features: match self.reporting {
                true => features,
                false => features.without(Features::PAGE_REPORTING),
            },
            bulk: self.bulk.map(|bit| Bulk {
                bit,
                ..Bulk::default()
            }),
            ..BalloonSettings::default()
        };
        PeerEvent::supported().map_err(BalloonError::Events)?;
        let balloon = Arc::new(Balloon::new(settings, self.target, (), NoDevices)?);
        let mut socket = Socket::listen(&self.socket)?;
        operator.tell(&BackendEvent::Listening {
            socket: self.socket.display().to_string(),
        });
        let mut running = Running {
            balloon,
            link: None,
            since: Instant::now(),
            last: None,
            refused: 0,
            next_stats: self.stats.map(|every| Instant::now() + every),
        };
        loop {
            running.connect(&mut socket, operator)?;
            match operator.next(running.patience()) {
                Some(Command::End) => break,
                Some(command) => running.obey(command, operator),
                None => {}
            }
            running.look(self.stats, operator);
        }
        running.disconnect(operator);
        Ok(report(&running.balloon.standing()))
    }
}

/// State of a running job.
struct Running {
    balloon: Arc<Balloon<NoDevices>>,
    link: Option<Link<Balloon<NoDevices>>>,
    /// When the link began.
    since: Instant,
    /// Last report.
    last: Option<BalloonReport>,
    refused: u64,
    next_stats: Option<Instant>,
}

impl Running {
    /// Takes the next front end, when there is none.
    fn connect(
        &mut self,
        socket: &mut Socket,
        operator: &mut dyn Operator,
    ) -> Result<(), BalloonError> {
        socket.look().map_err(BalloonError::Accept)?;
        if let Some(error) = socket.shortage() {
            let cause = format!("front ends cannot be accepted: {error}");
            operator.tell(&BackendEvent::Refused { cause });
        }
        let refused = socket.refused();
        if refused > 0 {
            let cause = format!("connections that began with no message of vhost-user: {refused}");
            operator.tell(&BackendEvent::Refused { cause });
        }
        if self.link.is_some() {
            return Ok(());
        }
        let Some(front) = socket.front() else {
            return Ok(());
        };
        self.since = Instant::now();
        operator.tell(&BackendEvent::Connected);
        self.balloon.leave(false);
        match Link::new(front, self.balloon.clone()) {
            Ok(link) => self.link = Some(link),
            Err(error) => operator.tell(&disconnected(&error)),
        }
        Ok(())
    }

    /// Time that the operator may take.
    fn patience(&self) -> Duration {
        match self.link {
            Some(_) => self.since.elapsed().clamp(SOON, TICK),
            None => TICK,
        }
    }

    fn disconnect(&mut self, operator: &mut dyn Operator) {
        let Some(link) = self.link.take() else {
            return;
        };
        self.balloon.leave(true);
        let cause = link.close();
        // The last events are reported before the disconnection.
        self.look(None, operator);
        operator.tell(&BackendEvent::Disconnected { cause });
    }

    fn obey(&mut self, command: Command, operator: &mut dyn Operator) {
        match command {
            Command::Target(bytes) => self.balloon.set_target(bytes),
            Command::Stats => self.ask(),
            Command::Hint => {
                if let Err(error) = self.balloon.start_hints() {
                    let cause = error.to_string();
                    operator.tell(&BackendEvent::Refused { cause });
                }
            }
            Command::StopHints => self.balloon.stop_hints(),
            Command::End => {}
        }
    }

    fn ask(&self) {
        self.balloon.ask();
        if let Some(link) = &self.link {
            link.wake();
        }
    }

    /// Hands on what happened, and does what it is time for.
    fn look(&mut self, every: Option<Duration>, operator: &mut dyn Operator) {
        let due = self.next_stats.is_some_and(|next| Instant::now() >= next);
        if let Some(every) = every.filter(|_| due) {
            self.next_stats = Some(Instant::now() + every);
            self.ask();
        }
        let (events, config_changed) = self.balloon.heard();
        for event in &events {
            operator.tell(event);
        }
        if let Some(link) = self.link.as_ref().filter(|_| config_changed) {
            // A front end that does not listen has gone, or sees it later.
            let _ = link.config_changed();
        }
        let standing = self.balloon.standing();
        if standing.refused > self.refused {
            self.refused = standing.refused;
            if let Some(cause) = self.balloon.latest_refusal() {
                operator.tell(&BackendEvent::Refused { cause });
            }
        }
        let now = report(&standing);
        if self.last != Some(now) {
            self.last = Some(now);
            operator.tell(&BackendEvent::Balloon(now));
        }
        if self.link.as_ref().is_some_and(Link::ended) {
            self.disconnect(operator);
        }
    }
}

fn disconnected(error: &LinkError) -> BackendEvent {
    BackendEvent::Disconnected {
        cause: Some(super::sentence(error)),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn report(standing: &Standing) -> BalloonReport {
    let counters = standing.counters;
    BalloonReport {
        target_bytes: standing.target,
        actual_bytes: standing.actual,
        reached_ns: nanoseconds(standing.reached),
        messages: counters.chains,
        inflated_bytes: counters.inflated,
        deflated_bytes: counters.deflated,
        reported_bytes: counters.reported,
        discarded_bytes: counters.discarded,
        discards: counters.discards,
        busy_ns: nanoseconds(counters.busy),
        discarding_ns: nanoseconds(counters.discarding),
        refused: standing.refused,
    }
}
