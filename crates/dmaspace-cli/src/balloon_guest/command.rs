//! `dmaspace balloon-guest`: this process' memory in a balloon whose device it drives itself.

use std::thread;
use std::time::Duration;

use crate::balloon_guest::{GuestEvent, GuestJob, GuestOperator};
use virtio_balloon::BulkBit;

use crate::stop::Stop;
use crate::{exit, fail, print, refuse, size};

pub(crate) const ABOUT: &str = "Drives a balloon's device (virtio, on PCI) from a process of the guest, for kernels that have no \
     driver for it, or none for messages in bulk: takes memory, 2M pages first, holds it with real \
     pins, finds its physical addresses and tells the device, in runs. It follows the target that the \
     device has, and answers when statistics are asked for.\n\n\
     It needs root, and a device that the kernel does not drive. A signal ends it: the balloon is \
     emptied, the device is reset, and the guest has all of its memory back.\n\n\
     Exit status: 0 when a signal, or --until-empty, ended it; 1 when something broke; 2 when the \
     device cannot be had, or what is to be told cannot be written.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
     dmaspace balloon-guest --device 0000:00:08.0\n  \
     dmaspace balloon-guest --device 0000:00:08.0 --bulk-bit 23 --json";

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct BalloonGuestArgs {
    /// The balloon's address on PCI
    ///
    /// Example: --device 0000:00:08.0
    #[arg(long, value_name = "ADDRESS")]
    device: String,

    /// Take messages in bulk under this feature bit, if the device offers it [default: page numbers]
    ///
    /// The bit is nobody's but ours: 9 to 23 or 50 to 63, the same as the device's.
    ///
    /// Example: --bulk-bit 23
    #[arg(long, value_name = "BIT", value_parser = crate::balloon::bulk_bit)]
    bulk_bit: Option<BulkBit>,

    /// Leave the guest this much memory in any case [default: an eighth]
    ///
    /// Example: --reserve 256M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    reserve: Option<u64>,

    /// End when the balloon was in use and is empty again
    ///
    /// For scripts: whoever sets the target ends it by that.
    ///
    /// Example: --until-empty
    #[arg(long)]
    until_empty: bool,

    /// Tell what happens as JSON, a line each
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
    /// There is nothing in it, and nothing is wanted.
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
        if let GuestEvent::Balloon {
            target_bytes,
            actual_bytes,
            ..
        } = event
        {
            self.used |= *actual_bytes > 0;
            self.empty = *target_bytes == 0 && *actual_bytes == 0;
        }
        let line = if self.json {
            serde_json::to_string(event).ok()
        } else {
            Some(sentence(event))
        };
        let Some(line) = line else { return };
        if let Err(error) = print(&(line + "\n")) {
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
                "; the guest has no more to give"
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
        assert!(!at(0, 0));
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
            "balloon: 1 MiB of 2 MiB; the guest has no more to give"
        );
    }
}
