//! VT-d: `DMAR:` and, from interrupt remapping, `DMAR-IR:` and `INTR-REMAP:`.
//!
//! A reason without `0x` is decimal, other numbers without it are hexadecimal. Kernels before 4.2 print the reason on
//! a line of its own. Addresses are pages.

use super::reader::{Line, State, Wait, add_line, note};
use super::text::{Text as _, after, cut, hex, hex_after, hex_part, number, pci, small, starts};
use super::{
    Absent, Address, Certainty, Citation, Class, Dump, DumpEntry, DumpTable, Family, FaultAccess,
    FaultRecord, LogEvent, PciAddress, Stage,
};
use crate::codes;

/// Entries of one dump: five levels, a PASID entry of eight words, and those above.
const MOST_ENTRIES: usize = 32;

const QUEUE: Citation = Citation {
    document: "Intel VT-d specification",
    section: "6.5.2 Queued Invalidation Interface; 11.4.7.1 Fault Status Register",
};

const PAGE_REQUESTS: Citation = Citation {
    document: "Intel VT-d specification",
    section: "7.4.1 Page Request Descriptor",
};

pub(super) fn decode(line: Line<'_>, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let text = line.text;
    // The commonest line.
    if let Some(rest) = text.strip_prefix("DMAR: DRHD: handling fault status reg ") {
        return status(line, rest, out);
    }
    if let Some(rest) = after(text, "Request device [") {
        return fault(line, rest, state, out);
    }
    if let Some(rest) = after(text, "[fault reason") {
        return reason_alone(line, rest, state, out);
    }
    // Xen's second line; its reasons are hexadecimal.
    if let Some(rest) = after(text, "DMAR: reason ") {
        let rest = format!("0x{}", rest.trim_start().replacen(" - ", "] ", 1));
        return reason_alone(line, &rest, state, out);
    }
    if text.has("DMAR hardware is malfunctioning") {
        let mut record = unit_record(
            line,
            "the unit has not answered in time: the kernel has stopped",
        );
        record.text = cut(text.trim(), 200).to_owned();
        State::emit(record, out);
        return true;
    }
    let Some(rest) = message(text) else {
        return false;
    };
    if rest.starts_with("Flush IOTLB failed") {
        State::emit(
            unit_record(line, "the unit has not carried out an invalidation"),
            out,
        );
        return true;
    }
    if let Some(rest) = after(rest, "handling fault status reg") {
        return status(line, rest, out);
    }
    queue_error(line, rest, state, out)
        || page_request(line, rest, state, out)
        || dump(line, rest, state, out)
}

/// The status of an interrupt, FSTS.
fn status(line: Line<'_>, rest: &str, out: &mut Vec<LogEvent>) -> bool {
    let Some((status, _)) = hex(rest) else {
        return false;
    };
    // PFO: there was no room for a record.
    if status & 1 == 1 {
        out.push(LogEvent::Overflow(note(Some(Family::Vtd), line)));
    }
    true
}

/// The message behind the driver's prefix.
fn message(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let text = starts(text, "dmar: DMAR:").unwrap_or(text);
    ["DMAR:", "DMAR-IR:", "dmar:", "[VT-D]DMAR:"]
        .iter()
        .find_map(|prefix| starts(text, prefix))
        .map(str::trim_start)
}

/// A fault record. `rest` begins with the device.
fn fault(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let text = line.text;
    // A second bracket in old kernels.
    let Some((device, rest)) = pci(rest.trim_start_matches('[')) else {
        return false;
    };
    let mut record = FaultRecord::new(Family::Vtd, line);
    record.pci = Some(device);
    let kind = text.around("Request device").map_or("", |(kind, _)| kind);
    record.access = if kind.has("DMA Read") {
        FaultAccess::Read
    } else if kind.has("DMA Write") {
        FaultAccess::Write
    } else {
        FaultAccess::Unknown
    };
    // Before the device in new kernels, behind it in old ones; all ones: none.
    let pasid = hex_after(kind, "] PASID ").or_else(|| {
        let key = if kind.has("NO_PASID") {
            None
        } else {
            hex_after(kind, " PASID ")
        };
        key.or_else(|| hex_after(rest, "] PASID "))
    });
    record.pasid = small(pasid).filter(|pasid| *pasid != u32::MAX);
    record.address = hex_after(rest, "fault addr").map(|value| Address {
        value,
        exact: false,
    });
    if let Some(index) = hex_after(rest, "fault index") {
        record.fields.push(("index", index));
    }
    if kind.has("INTR-REMAP") {
        record.class = Class::InterruptRequest;
        record.certainty = Certainty::Certain;
    }
    record.source = codes::VTD.source;
    record.meaning = "the line ends before its reason";
    // A record before that never got its reason.
    state.complete(Wait::Reason, None, out);
    match after(rest, "[fault reason") {
        Some(rest) => {
            reason(&mut record, rest);
            State::emit(record, out);
        }
        None => state.wait(Wait::Reason, record, out),
    }
    true
}

/// The second line of old kernels.
fn reason_alone(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let joined = state.join(Wait::Reason, None, line, |record| reason(record, rest));
    if joined {
        state.complete(Wait::Reason, None, out);
        return true;
    }
    // The first line is not in the log.
    if number(rest).is_none() {
        return false;
    }
    let mut record = FaultRecord::new(Family::Vtd, line);
    record.source = codes::VTD.source;
    reason(&mut record, rest);
    State::emit(record, out);
    true
}

/// Fills in the reason; `rest` begins with the number.
fn reason(record: &mut FaultRecord, rest: &str) {
    // Xen writes 0ch.
    let xen = hex_part(rest).and_then(|(value, rest)| Some((value, rest.strip_prefix('h')?)));
    let Some((value, rest)) = xen.or_else(|| number(rest)) else {
        return;
    };
    let text = rest.strip_prefix(']').unwrap_or(rest).trim();
    record.text = cut(text, 200).to_owned();
    record.code = small(Some(value));
    let Some(code) = record.code.and_then(|code| codes::VTD.get(code)) else {
        if record.class == Class::Unknown {
            record.meaning = "a reason without a name here";
        }
        return;
    };
    record.name = code.name();
    record.meaning = code.meaning();
    record.class = code.class;
    record.certainty = code.certainty;
    record.stage = match code.code {
        0x04..=0x07 | 0x0c | 0x78..=0x7c => Some(Stage::Two),
        0x70..=0x77 | 0x80..=0x82 => Some(Stage::One),
        _ => None,
    };
    match code.code {
        // The request asked to execute: ER = 1.
        0x5c | 0x82 => record.access = FaultAccess::Execute,
        0x20..=0x2f => record.access = FaultAccess::Unknown,
        _ => {}
    }
}

fn unit_record(line: Line<'_>, meaning: &'static str) -> FaultRecord {
    let mut record = FaultRecord::new(Family::Vtd, line);
    record.meaning = meaning;
    record.class = Class::UnitError;
    record.certainty = Certainty::Certain;
    record.source = QUEUE;
    record
}

/// Errors of the invalidation queue, with the commands at its head.
fn queue_error(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    if let Some(rest) = starts(rest, "VT-d detected ") {
        let (name, meaning) = if rest.has("Time-out") {
            ("ITE", "a device has not answered an invalidation in time")
        } else if rest.has("Completion") {
            (
                "ICE",
                "a device has answered an invalidation that was not under way",
            )
        } else {
            ("IQE", "the invalidation queue has stopped at a command")
        };
        let mut record = FaultRecord::new(Family::Vtd, line);
        record.name = name;
        record.meaning = meaning;
        record.class = Class::UnitError;
        record.certainty = Certainty::Certain;
        record.source = QUEUE;
        record.text = cut(rest.trim(), 200).to_owned();
        if let Some(id) = hex_after(rest, "SID ") {
            // 0 on units that do not report it.
            let id = u16::try_from(id).ok().filter(|id| *id != 0);
            record.pci = id.map(|id| PciAddress::from_id(0, id));
        }
        record.code = small(hex_after(rest, "Reason "));
        state.wait(Wait::Commands, record, out);
        return true;
    }
    let command = starts(rest, "QI HEAD: ").map(|rest| (rest, ["head qw0", "head qw1"]));
    let command = command
        .or_else(|| starts(rest, "QI PRIOR: ").map(|rest| (rest, ["prior qw0", "prior qw1"])));
    if let Some((rest, names)) = command {
        let words = [hex_after(rest, "qw0 ="), hex_after(rest, "qw1 =")];
        state.join(Wait::Commands, None, line, |record| {
            for (name, word) in names.into_iter().zip(words) {
                if let Some(word) = word {
                    record.fields.retain(|(key, _)| *key != name);
                    record.fields.push((name, word));
                }
            }
        });
        return true;
    }
    let cleared = ["(IQE) cleared", "(ITE) cleared", "(ICE) cleared"];
    if cleared.iter().any(|end| rest.contains(end)) {
        state.join(Wait::Commands, None, line, |_| {});
        state.complete(Wait::Commands, None, out);
        return true;
    }
    false
}

/// Page requests that the driver refuses: the reason, then the request.
fn page_request(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let rest = starts(rest, "IOMMU:").unwrap_or(rest).trim_start();
    let Some((unit, rest)) = rest.around(": ") else {
        return false;
    };
    if rest.has("PRQ overflow") {
        if rest.has("detected") {
            out.push(LogEvent::Overflow(note(Some(Family::Vtd), line)));
        }
        return true;
    }
    let reasons = [
        (
            "Address is not canonical",
            "the page request's address is not canonical",
        ),
        (
            "Page request in Privilege Mode",
            "a page request asks for privilege",
        ),
        (
            "Execution request not supported",
            "a page request asks to execute",
        ),
    ];
    let mut found = reasons.iter().filter(|(words, _)| rest.starts_with(words));
    if let Some((_, meaning)) = found.next() {
        let mut record = page_record(line, unit);
        record.meaning = meaning;
        record.text = cut(rest.trim(), 200).to_owned();
        state.wait(Wait::PageRequest, record, out);
        return true;
    }
    let Some(words) = starts(rest, "Invalid page request:") else {
        return false;
    };
    let words = hex(words).and_then(|(first, rest)| Some((first, hex(rest)?.0)));
    let fill = |record: &mut FaultRecord| {
        if let Some((first, second)) = words {
            page_fields(record, first, second);
        }
    };
    if state.join(Wait::PageRequest, Some(unit), line, fill) {
        state.complete(Wait::PageRequest, Some(unit), out);
    } else {
        let mut record = page_record(line, unit);
        record.meaning = "a page request is invalid";
        if let Some((first, second)) = words {
            page_fields(&mut record, first, second);
        }
        State::emit(record, out);
    }
    true
}

fn page_record(line: Line<'_>, unit: &str) -> FaultRecord {
    let mut record = FaultRecord::new(Family::Vtd, line);
    record.unit = Some(cut(unit, 64).to_owned());
    record.class = Class::AtsRefused;
    record.certainty = Certainty::Likely;
    record.source = PAGE_REQUESTS;
    record
}

/// The request's descriptor.
fn page_fields(record: &mut FaultRecord, first: u64, second: u64) {
    record.pci = Some(PciAddress::from_id(0, (first >> 16) as u16));
    record.pasid = (first >> 8 & 1 == 1).then_some((first >> 32) as u32 & 0xf_ffff);
    record.address = Some(Address {
        value: second & !0xfff,
        exact: false,
    });
    let (execute, read, write) = (first >> 52 & 1, second & 1, second >> 1 & 1);
    record.access = match (execute, read, write) {
        (1, ..) => FaultAccess::Execute,
        (_, _, 1) => FaultAccess::Write,
        (_, 1, _) => FaultAccess::Read,
        _ => FaultAccess::Unknown,
    };
    record.privileged = Some(first >> 53 & 1 == 1);
    record.fields.push(("qw0", first));
    record.fields.push(("qw1", second));
}

/// Tables that the driver prints after a fault.
fn dump(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    if let Some(rest) = starts(rest, "Dump ") {
        let Some((unit, rest)) = rest.around(" table entries for IOVA ") else {
            return false;
        };
        let Some((iova, _)) = hex(rest) else {
            return false;
        };
        let dump = Dump {
            family: Family::Vtd,
            unit: Some(cut(unit, 64).to_owned()),
            iova,
            entries: Vec::new(),
            absent: None,
            lines: line.numbers().collect(),
            time: line.time,
        };
        state.begin_dump(dump, out);
        return true;
    }
    let entry = entry(rest);
    let absent = absent(rest);
    if entry.is_none() && absent.is_none() {
        return false;
    }
    if let Some(dump) = state.dump() {
        add_line(&mut dump.lines, line);
        if dump.entries.len() < MOST_ENTRIES {
            dump.entries.extend(entry);
        }
        dump.absent = dump.absent.or(absent);
    }
    let leaf = matches!(
        entry,
        Some(DumpEntry {
            table: DumpTable::Page(1),
            words: [word, _],
        }) if word & 7 != 0
    );
    if leaf || absent.is_some() {
        state.complete_dump(out);
    }
    true
}

fn entry(rest: &str) -> Option<DumpEntry> {
    let halves = |rest: &str| Some([hex_after(rest, "low ")?, hex_after(rest, "hi ")?]);
    if let Some(rest) = starts(rest, "pte level: ") {
        let (level, rest) = number(rest)?;
        return Some(DumpEntry {
            table: DumpTable::Page(level.try_into().ok()?),
            words: [hex_after(rest, "pte value: ")?, 0],
        });
    }
    if let Some(rest) = starts(rest, "pasid table entry[") {
        let (place, rest) = number(rest)?;
        return Some(DumpEntry {
            table: DumpTable::Pasid(place.try_into().ok()?),
            words: [hex_after(rest, "]: ")?, 0],
        });
    }
    let (table, words) = if let Some(rest) = starts(rest, "scalable mode root entry: ") {
        (DumpTable::ScalableRoot, halves(rest)?)
    } else if let Some(rest) = starts(rest, "root entry: ") {
        (DumpTable::Root, [hex(rest)?.0, 0])
    } else if let Some(rest) = starts(rest, "context entry: ") {
        (DumpTable::Context, halves(rest)?)
    } else if let Some(rest) = starts(rest, "pasid dir entry: ") {
        (DumpTable::PasidDirectory, [hex(rest)?.0, 0])
    } else {
        return None;
    };
    Some(DumpEntry { table, words })
}

fn absent(rest: &str) -> Option<Absent> {
    // Kernels before 6.13 say PTE.
    for key in [
        "page table not present at level ",
        "PTE not present at level ",
    ] {
        if let Some(rest) = starts(rest, key) {
            return Some(Absent::Level(number(rest)?.0.try_into().ok()?));
        }
    }
    let rest = rest.trim_end();
    match rest {
        "root table is not present" => Some(Absent::Root),
        "context table is not present" => Some(Absent::Context),
        "pasid directory table is not present" => Some(Absent::PasidDirectory),
        "pasid table is not present" => Some(Absent::PasidTable),
        "legacy mode page table is not present" | "scalable mode page table is not present" => {
            Some(Absent::PageTable)
        }
        _ => None,
    }
}
