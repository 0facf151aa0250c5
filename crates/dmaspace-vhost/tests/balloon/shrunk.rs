//! A front end that makes its memory file shorter while the balloon has it mapped.

use hostmem::ShrinkWatch;

use super::*;

/// A message that waits in the ring behind one that went in, and of which the balloon was not told.
fn waiting(monitor: &mut Monitor) {
    monitor.inflate(0, PAGES, 256);
    let pages = (0..256).map(|page| (PAGES / 4096 + page) as u32);
    let message: Vec<u8> = pages.flat_map(u32::to_le_bytes).collect();
    monitor.put(INFLATE, 1, &message);
}

fn end_of_session(running: &mut Running) -> Option<String> {
    let ended = running.wait(|event| matches!(event, Event::Disconnected { .. }));
    let Event::Disconnected { cause } = ended else {
        panic!("waited for the end");
    };
    cause
}

#[test]
fn a_front_end_that_shrinks_its_memory_ends_by_name_and_the_next_one_is_served() {
    ShrinkWatch::install().unwrap();
    let mut running = Running::start(1 << 20);
    let [_, available, used, buffer] = ring(INFLATE).map(|at| at - BASE);
    // Everything is gone; the ring is, from its second part on; the message in it, in the middle of the ring.
    for (left, found) in [
        (0, available),
        (available, available),
        (used, buffer),
        (buffer, buffer),
    ] {
        let file = guest();
        // This queue alone: a look at the ring of another one would be first.
        let mut monitor = Monitor::connect_with(&running.socket, &file, &[0], FEATURES, None);
        waiting(&mut monitor);
        file.set_len(OFFSET + left).unwrap();
        monitor.kicks[INFLATE].write(1).unwrap();
        let cause = end_of_session(&mut running).unwrap();
        let region = format!("region {}, ", runs_span());
        assert!(
            cause.starts_with("the front end has shrunk its memory: ") && cause.contains(&region),
            "{cause}"
        );
        let offset = cause.rsplit_once("offset ").unwrap().1;
        let offset = u64::from_str_radix(offset.trim_start_matches("0x"), 16).unwrap();
        assert!((left..=found).contains(&offset), "{left:#x}: {cause}");
        drop(monitor);
        // It is served as if nothing had been.
        let mut next = Monitor::connect(&running.socket, &guest(), [0; 3]);
        next.inflate(0, PAGES, 256);
        assert_eq!(next.config(), [256, 256]);
        drop(next);
        assert_eq!(end_of_session(&mut running), None);
    }
    let report = running.end();
    // What waited was zeros or nothing, and no page of the guest.
    assert_eq!(report.inflated_bytes, 8 << 20);
}

/// The guest's memory, as it is shown.
fn runs_span() -> String {
    runs::Span::<runs::GuestAddr>::new(BASE, BYTES as u64).to_string()
}
