//! Tests of the decoders.

mod anything;
mod linux;
mod spellings;

use super::{FaultRecord, LogEvent, Reader, strip};

/// The events of a log.
fn events(log: &str) -> Vec<LogEvent> {
    let mut reader = Reader::new();
    let mut events = Vec::new();
    for (line, number) in log.lines().zip(1..) {
        let message = strip(line);
        reader.line(&message.text, number, message.time, &mut events);
    }
    reader.finish(&mut events);
    events
}

/// The faults of a log.
fn faults(log: &str) -> Vec<FaultRecord> {
    let events = events(log).into_iter();
    let faults = events.filter_map(|event| match event {
        LogEvent::Fault(fault) => Some(*fault),
        _ => None,
    });
    faults.collect()
}

/// The one fault of a log.
fn fault(log: &str) -> FaultRecord {
    let [fault] = <[FaultRecord; 1]>::try_from(faults(log)).expect(log);
    fault
}
