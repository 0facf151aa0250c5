//! The target of the log's reader: lines of any bytes.

use iommu::log::{LogEvent, Reader, strip};

/// Decodes the lines of `data`. Each event refers to lines that were read, in order, and is of bounded size.
pub fn decode(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut reader = Reader::new();
    let mut events = Vec::new();
    let mut count = 0;
    for line in text.lines() {
        count += 1;
        let message = strip(line);
        reader.line(&message.text, count, message.time, &mut events);
        for event in events.drain(..) {
            check(&event, count);
        }
    }
    reader.finish(&mut events);
    for event in events.drain(..) {
        check(&event, count);
    }
    reader.finish(&mut events);
    assert!(events.is_empty());
}

fn check(event: &LogEvent, count: u64) {
    let (lines, size) = match event {
        LogEvent::Fault(fault) => {
            let parts = fault.fields.len() + fault.flags.len();
            (&fault.lines[..], parts + fault.text.len())
        }
        LogEvent::Dump(dump) => (&dump.lines[..], dump.entries.len()),
        LogEvent::Overflow(note) | LogEvent::Undecoded(note) => {
            (std::slice::from_ref(&note.line), note.text.len())
        }
        LogEvent::Suppressed(suppressed) => (
            std::slice::from_ref(&suppressed.line),
            suppressed.function.len(),
        ),
        _ => return,
    };
    assert!(lines.is_sorted() && lines.len() <= 34, "{event:?}");
    assert!(
        lines.iter().all(|line| (1..=count).contains(line)),
        "{event:?}"
    );
    assert!(size <= 500, "{event:?}");
}
