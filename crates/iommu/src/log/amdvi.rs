//! AMD-Vi: `Event logged [NAME key=value ..]`, behind `AMD-Vi:` or `AMD IOMMU:` and, in kernels since 4.13, a device.
//!
//! All numbers are hexadecimal, with or without `0x`. RW means something with PR only.

use super::reader::{Line, State, Wait, note};
use super::text::{Text as _, after, cut, head, hex, hex_after, number_after, pci, small, starts};
use super::{
    Address, Certainty, Citation, Class, Family, FaultAccess, FaultRecord, LogEvent, PciAddress,
};
use crate::codes;

/// Flags of an event, from bit 0 (48 of the entry) on.
const FLAGS: [&str; 9] = ["GN", "NX", "US", "I", "PR", "RW", "PE", "RZ", "TR"];

/// Names of events. Kernels write some of them in a shorter form.
const NAMES: [(&str, u32); 14] = [
    ("ILLEGAL_DEV_TABLE_ENTRY", 0x1),
    ("IO_PAGE_FAULT", 0x2),
    ("DEV_TAB_HARDWARE_ERROR", 0x3),
    ("PAGE_TAB_HARDWARE_ERROR", 0x4),
    ("ILLEGAL_COMMAND_ERROR", 0x5),
    ("COMMAND_HARDWARE_ERROR", 0x6),
    ("IOTLB_INV_TIMEOUT", 0x7),
    ("INVALID_DEVICE_REQUEST", 0x8),
    ("INVALID_PPR_REQUEST", 0x9),
    ("EVENT_COUNTER_ZERO", 0xa),
    ("GUEST_EVENT_FAULT", 0xb),
    ("RMP_PAGE_FAULT", 0xd),
    ("RMP_HW_ERROR", 0xe),
    ("RMP_HARDWARE_ERROR", 0xe),
];

const COMMANDS: Citation = Citation {
    document: "AMD 48882",
    section: "2.4 Commands (COMPLETION_WAIT)",
};

const LOG: Citation = Citation {
    document: "AMD 48882",
    section: "2.5 Event Logging (entries without a code)",
};

const DOMAIN: Citation = Citation {
    document: "Linux, drivers/iommu/amd/iommu.c",
    section: "amd_iommu_report_page_fault",
};

pub(super) fn decode(line: Line<'_>, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let text = line.text;
    if let Some((before, event)) = text.around("vent logged [") {
        return logged(line, before, event, state, out);
    }
    // The second line of kernels 2.6 to 4.12, which print an event in two parts.
    if NAMES.iter().any(|(name, _)| starts(text, name).is_some()) {
        return logged(line, "", text.trim_start(), state, out);
    }
    let Some((unit, rest)) = message(text) else {
        return false;
    };
    unit_error(line, unit, rest, state, out)
        || xen(line, rest, out)
        || entry(line, rest, state, out)
}

/// The unit or device before the driver's prefix, and the message behind it.
fn message(text: &str) -> Option<(Option<&str>, &str)> {
    for prefix in ["AMD-Vi:", "AMD IOMMU:"] {
        if let Some((before, rest)) = text.around(prefix) {
            let unit = before.trim().trim_end_matches(':');
            return Some(((!unit.is_empty()).then_some(unit), rest.trim_start()));
        }
    }
    None
}

/// An event. `before` is the text before it, `event` begins with its name.
fn logged(
    line: Line<'_>,
    before: &str,
    event: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let event = event.trim_start();
    let name = event.split([' ', ']', '\t']).next().unwrap_or_default();
    let fields = event.get(name.len()..).unwrap_or_default();
    let mut record = FaultRecord::new(Family::AmdVi, line);
    record.source = codes::AMDVI.source;
    record.text = cut(event.trim_end_matches([']', ' ']), 200).to_owned();
    device_before(&mut record, before);
    if name == "Device" {
        // "Device not attached to domain properly", then a line with the device.
        record.name = "IO_PAGE_FAULT";
        record.meaning = "the kernel has no domain for the device";
        record.code = Some(0x2);
        record.class = Class::DeviceEntry;
        record.certainty = Certainty::Likely;
        record.source = DOMAIN;
        state.complete(Wait::Device, None, out);
        state.wait(Wait::Device, record, out);
        return true;
    }
    if name == "UNKNOWN" || name.starts_with("UNKNOWN") {
        raw(&mut record, fields);
        State::emit(record, out);
        return true;
    }
    let Some((_, code)) = NAMES.iter().find(|(known, _)| *known == name) else {
        out.push(LogEvent::Undecoded(note(Some(Family::AmdVi), line)));
        return true;
    };
    record.code = Some(*code);
    if let Some((device, _)) = after(fields, "device=").and_then(pci) {
        record.pci = Some(device);
    }
    record.domain = small(hex_after(fields, "domain="));
    record.pasid = small(hex_after(fields, "pasid="));
    if *code == 0x2 && record.domain.is_none() {
        // Kernels that print the domain under the name of a PASID.
        record.domain = record.pasid.take();
    }
    let address = ["address=", "gpa=", "spa="]
        .iter()
        .find_map(|key| hex_after(fields, key));
    record.address = address.map(|value| Address { value, exact: true });
    for key in ["vmg_tag", "flags_rmp", "tag"] {
        if let Some(value) = key_value(fields, key) {
            record.fields.push((key, value));
        }
    }
    flags(&mut record, *code, key_value(fields, "flags"));
    if *code == 0x2 && record.flags.contains(&"GN") {
        // The kernel prints the PASID of a request with one as its domain.
        record.pasid = record.domain.take();
    }
    if matches!(code, 0x5 | 0x6) {
        // The command's address, which is no address of a device.
        if let Some(address) = record.address.take() {
            record.fields.push(("command address", address.value));
        }
    }
    if matches!(code, 0x1 | 0x5) {
        // The entry or the command follows.
        state.complete(Wait::Entry, None, out);
        state.wait(Wait::Entry, record, out);
    } else {
        State::emit(record, out);
    }
    true
}

/// Xen's form: `IO_PAGE_FAULT: 0000:03:00.0 d0 addr fdf8000000 flags 0x8`, and, until 4.13, `IO_PAGE_FAULT: domain = 0,
/// device id = 0x300, fault address = 0x1000, flags = 0x20`.
fn xen(line: Line<'_>, rest: &str, out: &mut Vec<LogEvent>) -> bool {
    let Some((name, fields)) = rest.around(": ") else {
        return false;
    };
    let Some((_, code)) = NAMES.iter().find(|(known, _)| *known == name.trim()) else {
        return false;
    };
    let mut record = FaultRecord::new(Family::AmdVi, line);
    record.source = codes::AMDVI.source;
    record.code = Some(*code);
    record.text = cut(rest.trim_end(), 200).to_owned();
    let id = hex_after(fields, "device id = ").and_then(|id| u16::try_from(id).ok());
    record.pci = pci(fields)
        .map(|(device, _)| device)
        .or_else(|| id.map(|id| PciAddress::from_id(0, id)));
    let address = hex_after(fields, " addr ").or_else(|| hex_after(fields, "fault address = "));
    record.address = address.map(|value| Address { value, exact: true });
    record.domain = small(number_after(fields, " d").or_else(|| number_after(fields, "domain = ")));
    let value = hex_after(fields, "flags = ").or_else(|| hex_after(fields, " flags "));
    flags(&mut record, *code, value);
    State::emit(record, out);
    true
}

/// The number of a key that is not the end of another.
fn key_value(fields: &str, key: &str) -> Option<u64> {
    let mut rest = fields;
    while let Some((before, behind)) = rest.around(key) {
        if before.ends_with([' ', ',', '[']) {
            if let Some(value) = behind.strip_prefix('=') {
                return hex(value).map(|(value, _)| value);
            }
        }
        rest = behind;
    }
    None
}

/// The device, or the unit, whose driver has printed the line.
fn device_before(record: &mut FaultRecord, before: &str) {
    let Some((unit, _)) = message(before) else {
        return;
    };
    let Some(unit) = unit.and_then(|head| head.rsplit(' ').next()) else {
        return;
    };
    match pci(unit) {
        Some((device, "")) => record.pci = Some(device),
        _ => record.unit = Some(cut(unit, 64).to_owned()),
    }
}

/// Meaning, class and access by the flags.
fn flags(record: &mut FaultRecord, code: u32, flags: Option<u64>) {
    let known = flags.and_then(|flags| u32::try_from(flags).ok());
    let event = match (code, known) {
        // Without flags nothing says which kind it was.
        (0x2 | 0x8, None) => codes::AMDVI.get(code),
        (_, known) => codes::amdvi_event(code, known.unwrap_or(0)),
    };
    if let Some(event) = event {
        record.name = event.name();
        record.meaning = event.meaning();
        record.class = event.class;
        record.certainty = event.certainty;
    }
    let Some(flags) = known else {
        return;
    };
    record.fields.push(("flags", flags.into()));
    let set = |bit: usize| flags >> bit & 1 == 1;
    if matches!(code, 0x1 | 0x2 | 0x8 | 0xd) {
        let names = FLAGS.iter().enumerate().filter(|(bit, _)| set(*bit));
        record.flags.extend(names.map(|(_, name)| *name));
    }
    if code == 0x8 {
        record.fields.push(("type", (flags >> 9 & 7).into()));
    }
    let translated = matches!(code, 0x2 | 0xd) && set(4) && !set(3);
    if translated {
        record.access = if set(5) {
            FaultAccess::Write
        } else {
            FaultAccess::Read
        };
    }
}

/// An event that the kernel does not know, as four words.
fn raw(record: &mut FaultRecord, fields: &str) {
    let names = ["event[0]", "event[1]", "event[2]", "event[3]"];
    let words = names.map(|name| {
        let word = after(fields, name).and_then(|rest| hex(rest.strip_prefix('=')?));
        word.map(|(word, _)| word & 0xffff_ffff)
    });
    for (name, word) in names.into_iter().zip(words) {
        if let Some(word) = word {
            record.fields.push((name, word));
        }
    }
    if let [Some(first), Some(second), low, high] = words {
        let code = (second >> 28) as u32;
        record.code = Some(code);
        record.pci = record.pci.or(Some(PciAddress::from_id(0, first as u16)));
        if let (Some(low), Some(high)) = (low, high) {
            record.address = Some(Address {
                value: high << 32 | low,
                exact: true,
            });
        }
        flags(record, code, Some(second >> 16 & 0xfff));
    } else if let Some(kind) = hex_after(fields, "type=") {
        record.code = small(Some(kind));
    }
    if record.name.is_empty() {
        record.meaning = "an event without a name here";
    }
}

/// Errors of the unit, and what belongs to them.
fn unit_error(
    line: Line<'_>,
    unit: Option<&str>,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    // "IOMMU 0000:00:00.2: " in new kernels.
    let (unit, rest) = match starts(rest, "IOMMU ").and_then(head) {
        Some((unit, rest)) => (Some(unit), rest),
        None => (unit, rest),
    };
    let errors = [
        (
            "Completion-Wait loop timed out",
            "a command has not completed in time",
            COMMANDS,
        ),
        (
            "Command buffer timeout",
            "the command buffer has not drained in time",
            COMMANDS,
        ),
        (
            "No event written to event log",
            "the unit has announced an event and not written it",
            LOG,
        ),
        (
            "GA log notifier failed",
            "an entry of the guest APIC log could not be handed on",
            LOG,
        ),
    ];
    if let Some((words, meaning, source)) = errors.iter().find(|(words, ..)| rest.has(words)) {
        let mut record = FaultRecord::new(Family::AmdVi, line);
        record.unit = unit.map(|unit| cut(unit.rsplit(' ').next().unwrap_or(unit), 64).to_owned());
        record.meaning = meaning;
        record.class = Class::UnitError;
        record.certainty = Certainty::Certain;
        record.source = *source;
        record.text = cut(words, 200).to_owned();
        state.complete(Wait::CommandBuffer, None, out);
        state.wait(Wait::CommandBuffer, record, out);
        return true;
    }
    if starts(rest, "CMD Buffer head=").is_some() || command(rest) {
        state.join(Wait::CommandBuffer, None, line, |_| {});
        return true;
    }
    if rest.has("log restarting") || rest.has("log overflow") || rest.has("Log overflow") {
        out.push(LogEvent::Overflow(note(Some(Family::AmdVi), line)));
        return true;
    }
    // Page requests whose PASID the kernel does not know.
    if let Some(rest) = starts(rest, "Invalid PASID : ") {
        let mut record = FaultRecord::new(Family::AmdVi, line);
        record.pasid = small(hex(rest).map(|(pasid, _)| pasid));
        let device = hex_after(rest, "device : ").and_then(|id| u16::try_from(id).ok());
        record.pci = device.map(|id| PciAddress::from_id(0, id));
        record.meaning = "a page request for a PASID that the device has not got";
        record.class = Class::AtsRefused;
        record.certainty = Certainty::Likely;
        record.source = PAGE_REQUESTS;
        State::emit(record, out);
        return true;
    }
    if starts(rest, "Unknown PPR request received").is_some() {
        let mut record = FaultRecord::new(Family::AmdVi, line);
        record.meaning = "an entry of the page request log with an unknown code";
        record.source = PAGE_REQUESTS;
        State::emit(record, out);
        return true;
    }
    false
}

const PAGE_REQUESTS: Citation = Citation {
    document: "AMD 48882",
    section: "2.6 Peripheral Page Request Logging",
};

/// A command of the command buffer: `  0: 08000000 ...`.
fn command(rest: &str) -> bool {
    let Some((number, words)) = rest.trim_start().around(": ") else {
        return false;
    };
    let decimal = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let word = |word: &str| word.len() == 8 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    decimal && words.split_ascii_whitespace().take(8).all(word)
}

/// Lines that follow an event: the device of one without a domain, words of an entry or a command.
fn entry(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    if let Some(fields) = starts(rest, "device=") {
        let joined = state.join(Wait::Device, None, line, |record| {
            record.pci = pci(fields).map(|(device, _)| device);
            record.domain = small(hex_after(fields, "domain="));
        });
        state.complete(Wait::Device, None, out);
        return joined;
    }
    if let Some(value) = starts(rest, "Control Reg :") {
        state.join(Wait::Entry, None, line, |record| {
            if let Some((value, _)) = hex(value) {
                record.fields.push(("control register", value));
            }
        });
        return true;
    }
    const WORDS: [(&str, &str); 8] = [
        ("DTE[0]:", "DTE[0]"),
        ("DTE[1]:", "DTE[1]"),
        ("DTE[2]:", "DTE[2]"),
        ("DTE[3]:", "DTE[3]"),
        ("CMD[0]:", "CMD[0]"),
        ("CMD[1]:", "CMD[1]"),
        ("CMD[2]:", "CMD[2]"),
        ("CMD[3]:", "CMD[3]"),
    ];
    for (key, name) in WORDS {
        let Some(word) = starts(rest, key).and_then(hex) else {
            continue;
        };
        state.join(Wait::Entry, None, line, |record| {
            record.fields.push((name, word.0))
        });
        if name.ends_with("[3]") {
            state.complete(Wait::Entry, None, out);
        }
        return true;
    }
    false
}
