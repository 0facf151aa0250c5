//! `dmaspace balloon-guest`: this process' memory in a balloon whose device it drives itself.

use std::thread;
use std::time::Duration;

use crate::balloon_guest::{GuestEvent, GuestJob, GuestOperator};
use virtio_balloon::BulkBit;

use crate::stop::Stop;
use crate::{exit, fail, json_line, print, refuse, size};

pub(crate) const ABOUT: &str = "Drives a virtio balloon on PCI from a process in the guest, for kernels without a driver for it or for its \
     messages in bulk. It allocates memory, 2M pages first, pins it, reads its physical addresses and sends \
     them to the device in runs. It follows the device's target and answers requests for statistics.\n\n\
     Requires root, and a device without a kernel driver. On a signal it empties the balloon and resets the \
     device, so the guest has all its memory again.\n\n\
     Exit status: 0 after a signal or --until-empty; 1 after a failure; 2 when the device cannot be \
     used, or output cannot be written.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     dmaspace balloon-guest --device 0000:00:08.0\n  \
     dmaspace balloon-guest --device 0000:00:08.0 --bulk-bit 23 --json";

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct BalloonGuestArgs {
    /// PCI address of the balloon
    ///
    /// Example: --device 0000:00:08.0
    #[arg(long, value_name = "ADDRESS")]
    device: String,

    /// Use messages in bulk under this feature bit, if the device offers it [default: page numbers]
    ///
    /// The bit is not part of the standard: 9 to 23 or 50 to 63, and the same for the device.
    ///
    /// Example: --bulk-bit 23
    #[arg(long, value_name = "BIT", value_parser = crate::balloon::bulk_bit)]
    bulk_bit: Option<BulkBit>,

    /// Leave the guest this much memory in any case [default: an eighth]
    ///
    /// Example: --reserve 256M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    reserve: Option<u64>,

    /// Exit when the balloon has been used and is empty again
    ///
    /// For scripts, which end it by setting the target to 0.
    ///
    /// Example: --until-empty
    #[arg(long)]
    until_empty: bool,

    /// Print events as JSON, one per line
    ///
    /// Names are stable and end in their unit: `actual_bytes`. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq 'select(.event == "balloon").actual_bytes'
    #[arg(long)]
    json: bool,
}

/// The command; its exit status.
pub(crate) fn run(args: &BalloonGuestArgs) -> u8 {
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let job = GuestJob {
        device: args.device.clone(),
        bulk: args.bulk_bit,
        block: 2 << 20,
        reserve: args.reserve,
    };
    let mut terminal = Terminal {
        stop: stop.clone(),
        json: args.json,
        until_empty: args.until_empty,
        used: false,
        empty: false,
        unwritten: false,
    };
    let (done, _) = stop.shielded(|| job.run(&mut terminal));
    match done {
        _ if terminal.unwritten => exit::INPUT,
        Ok(()) => exit::RIGHT,
        Err(error) if error.is_input() => fail(&error, exit::INPUT),
        Err(error) => fail(&error, exit::WRONG),
    }
}

/// Whoever sits there, or the program that does.
struct Terminal {
    stop: Stop,
    json: bool,
    until_empty: bool,
    /// There was something in the balloon.
    used: bool,
    /// There is nothing in it. What the device wants by now says nothing: it may be wanted full again.
    empty: bool,
    /// Standard output does not take what is told.
    unwritten: bool,
}

impl GuestOperator for Terminal {
    fn goes_on(&mut self, patience: Duration) -> bool {
        let ends =
            self.unwritten || self.stop.is_asked() || (self.until_empty && self.used && self.empty);
        if !ends {
            thread::sleep(patience);
        }
        !ends
    }

    fn tell(&mut self, event: &GuestEvent) {
        if let GuestEvent::Balloon { actual_bytes, .. } = event {
            self.used |= *actual_bytes > 0;
            self.empty = *actual_bytes == 0;
        }
        let line = if self.json {
            json_line(event).ok()
        } else {
            Some(sentence(event) + "\n")
        };
        let Some(line) = line else { return };
        if let Err(error) = print(&line) {
            refuse(&error);
            self.unwritten = true;
        }
    }
}

/// What happened, for people.
fn sentence(event: &GuestEvent) -> String {
    match event {
        GuestEvent::Begun { bulk: true, .. } => {
            "the device is driven, with messages in bulk".into()
        }
        GuestEvent::Begun { bulk: false, .. } => "the device is driven, with page numbers".into(),
        GuestEvent::Balloon {
            target_bytes,
            actual_bytes,
            starved,
        } => {
            let (actual, target) = (size::bytes(*actual_bytes), size::bytes(*target_bytes));
            let starved = if *starved {
                "; the guest has no more free memory"
            } else {
                ""
            };
            format!("balloon: {actual} of {target}{starved}")
        }
        GuestEvent::Stats => "statistics were asked for and sent".into(),
        GuestEvent::Trouble { cause } => format!("trouble: {cause}"),
        GuestEvent::Ended => "the device is reset, and all memory is back".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_the_balloon_was_used_and_is_empty() {
        ends_when_empty_with(0);
    }

    /// A host that sees the balloon empty may want it full at once, before the target is read again.
    #[test]
    fn it_ends_when_the_balloon_is_wanted_full_as_soon_as_it_is_empty() {
        ends_when_empty_with(4096);
    }

    fn ends_when_empty_with(target: u64) {
        let mut terminal = Terminal {
            stop: Stop::for_tests(false),
            json: true,
            until_empty: true,
            used: false,
            empty: false,
            unwritten: false,
        };
        let mut at = |target_bytes, actual_bytes| {
            terminal.tell(&GuestEvent::Balloon {
                target_bytes,
                actual_bytes,
                starved: false,
            });
            terminal.goes_on(Duration::ZERO)
        };
        assert!(at(0, 0), "not used yet");
        assert!(at(4096, 4096));
        assert!(at(0, 4096), "not empty yet");
        assert!(!at(target, 0));
    }

    #[test]
    fn sentences_name_what_was_got_and_wanted() {
        let event = GuestEvent::Balloon {
            target_bytes: 2 << 20,
            actual_bytes: 1 << 20,
            starved: true,
        };
        let told = sentence(&event);
        assert_eq!(
            told,
            "balloon: 1 MiB of 2 MiB; the guest has no more free memory"
        );
    }
}
