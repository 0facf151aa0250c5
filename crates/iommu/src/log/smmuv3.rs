//! SMMUv3 (`arm-smmu-v3`): a head with the event's number and four words; since 6.14 also two decoded lines.
//!
//! Words say more than decoded lines; where both are there the words decide.

use super::reader::{Line, State, Wait, note};
use super::text::{Text as _, after, cut, device, head, hex, hex_after, pci, small, starts};
use super::{
    Address, Certainty, Citation, Class, Family, FaultAccess, FaultRecord, LogEvent, Stage,
};
use crate::codes;

const COMMANDS: Citation = Citation {
    document: "Arm IHI 0070",
    section: "7.1 Command queue errors; 3.5 Command and Event queues",
};

const GLOBAL: Citation = Citation {
    document: "Arm IHI 0070",
    section: "7.5 Global error recording (SMMU_GERROR)",
};

const PAGE_REQUESTS: Citation = Citation {
    document: "Arm IHI 0070",
    section: "8.1 PRI queue",
};

/// SMMU_GERROR.
const ERRORS: [(u32, &str); 9] = [
    (0, "CMDQ_ERR"),
    (2, "EVENTQ_ABT_ERR"),
    (3, "PRIQ_ABT_ERR"),
    (4, "MSI_CMDQ_ABT_ERR"),
    (5, "MSI_EVENTQ_ABT_ERR"),
    (6, "MSI_PRIQ_ABT_ERR"),
    (7, "MSI_GERROR_ABT_ERR"),
    (8, "SFM_ERR"),
    (9, "CMDQP_ERR"),
];

const REGISTER: &str = "the unit has not taken over a register in time";

const WORDS: [&str; 4] = ["word 0", "word 1", "word 2", "word 3"];

pub(super) fn decode(line: Line<'_>, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    let Some((before, rest)) = head(line.text) else {
        return false;
    };
    let before = before.trim();
    let queue = rest.has("VINTF") || rest.has("vintf_map") || rest.has("VCMDQ");
    if !before.starts_with("arm-smmu-v3") && !queue {
        return false;
    }
    let unit = device(before);
    if starts(rest, "0x").is_some() {
        return word(line, unit, rest, state, out);
    }
    if let Some(rest) = starts(rest, "event: ") {
        return decoded(line, unit, rest, state, out);
    }
    if let Some(rest) = starts(rest, "event 0x") {
        let Some((code, _)) = hex(rest) else {
            return false;
        };
        state.complete(Wait::Event, Some(unit), out);
        state.complete(Wait::Command, Some(unit), out);
        let mut record = event_record(line, unit);
        set_code(&mut record, code as u32 & 0xff);
        state.wait(Wait::Event, record, out);
        return true;
    }
    if rest.starts_with("priv ") || rest.starts_with("unpriv ") {
        return syndrome(line, unit, rest, state, out);
    }
    error(line, unit, rest, state, out)
}

fn event_record(line: Line<'_>, unit: &str) -> FaultRecord {
    let mut record = FaultRecord::new(Family::SmmuV3, line);
    record.unit = Some(cut(unit, 64).to_owned());
    record.source = codes::SMMUV3.source;
    record
}

fn set_code(record: &mut FaultRecord, code: u32) {
    record.code = Some(code);
    match codes::SMMUV3.get(code) {
        Some(event) => {
            record.name = event.name();
            record.meaning = event.meaning();
            record.class = event.class;
            record.certainty = event.certainty;
        }
        None => record.meaning = "an event without a name here",
    }
}

/// Events whose record has the request's address and direction.
const fn directed(code: u32) -> bool {
    matches!(code, 0x01 | 0x07 | 0x0b | 0x10..=0x13 | 0x20)
}

/// Words of a record, one a line, or of a command that is skipped.
fn word(
    line: Line<'_>,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let Some((value, end)) = hex(rest) else {
        return false;
    };
    if !end.trim().is_empty() {
        return false;
    }
    if let Some(pending) = state.waiting(Wait::Event, Some(unit)) {
        let place = pending.step as usize;
        if let Some(name) = WORDS.get(place) {
            pending.step += 1;
            pending.record.fields.push((name, value));
            pending.add(line);
            fill(&mut pending.record, place, value);
            return true;
        }
    }
    state.join(Wait::Command, Some(unit), line, |record| {
        if record.fields.len() < 8 {
            record.fields.push(("command", value));
        }
    });
    let _ = out;
    true
}

/// Takes a word of the record in.
fn fill(record: &mut FaultRecord, place: usize, value: u64) {
    let bit = |n: u32| value >> n & 1 == 1;
    let code = record.code.unwrap_or(0);
    match place {
        0 => {
            record.id = Some(value >> 32);
            if record.code != Some(value as u32 & 0xff) {
                set_code(record, value as u32 & 0xff);
            }
            // SSV; in C_BAD_SUBSTREAMID the number is always valid.
            let pasid = bit(11) || code == 0x08;
            record.pasid = pasid.then_some((value >> 12) as u32 & 0xf_ffff);
        }
        1 => {
            if !directed(code) {
                return;
            }
            record.access = match (bit(35), bit(34)) {
                (true, true) => FaultAccess::Execute,
                (true, false) => FaultAccess::Read,
                (false, _) => FaultAccess::Write,
            };
            record.privileged = Some(bit(33));
            record.stage = Some(if bit(39) { Stage::Two } else { Stage::One });
            if matches!(code, 0x10..=0x13) {
                record.flags.push(match value >> 40 & 3 {
                    0 => "CLASS=CD",
                    1 => "CLASS=TT",
                    2 => "CLASS=IN",
                    _ => "CLASS=3",
                });
            }
            let flags = [
                (31, "STALL"),
                (33, "PnU"),
                (34, "InD"),
                (35, "RnW"),
                (39, "S2"),
            ];
            record
                .flags
                .extend(flags.iter().filter(|(n, _)| bit(*n)).map(|(_, name)| *name));
            if bit(31) {
                record.fields.push(("STAG", value & 0xffff));
            }
        }
        2 => {
            if directed(code) || code == 0x05 {
                record.address = Some(Address { value, exact: true });
            }
        }
        _ => {
            if matches!(code, 0x10..=0x13) && record.stage == Some(Stage::Two) {
                record.ipa = Some(value & 0xf_ffff_ffff_f000);
            } else if matches!(code, 0x03 | 0x09 | 0x0b | 0x25) {
                record
                    .fields
                    .push(("fetch address", value & 0xf_ffff_ffff_fff8));
            }
        }
    }
}

/// `event: NAME client: DEVICE sid: 0x8 ssid: 0x0 iova: 0x0 ipa: 0x0`.
fn decoded(
    line: Line<'_>,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let Some((name, rest)) = rest.around(" client: ") else {
        return false;
    };
    let Some((client, rest)) = rest.around(" sid: ") else {
        return false;
    };
    let id = hex(rest).map(|(id, _)| id);
    let named = codes::SMMUV3.codes.iter().find(|code| code.name() == name);
    let code = named.map(|code| code.code);
    let merge = |record: &mut FaultRecord, words: bool| {
        match pci(client) {
            Some((device, "")) => record.pci = Some(device),
            _ if client.starts_with('(') => {}
            _ => record.client = Some(cut(client, 64).to_owned()),
        }
        record.id = record.id.or(id);
        if words {
            return;
        }
        if let Some(code) = code {
            set_code(record, code);
        }
        // 0 stands for none, too.
        record.pasid = small(hex_after(rest, "ssid: ")).filter(|pasid| *pasid != 0);
        let address = hex_after(rest, "iova: ");
        record.address = address.map(|value| Address { value, exact: true });
        record.ipa = hex_after(rest, "ipa: ").filter(|ipa| *ipa != 0);
        if let Some(address) = hex_after(rest, "fetch_addr: ") {
            record.fields.push(("fetch address", address));
        }
    };
    // Words of the same event, without decoded lines so far.
    if let Some(pending) = state.waiting(Wait::Event, Some(unit)) {
        let same = pending.record.id.is_none_or(|known| Some(known) == id)
            && code.is_none_or(|code| pending.record.code == Some(code));
        if same && pending.step <= 4 {
            pending.add(line);
            merge(&mut pending.record, pending.step >= 3);
            pending.step = 5;
            if !code.is_some_and(|code| matches!(code, 0x10..=0x13)) {
                state.complete(Wait::Event, Some(unit), out);
            }
            return true;
        }
    }
    state.complete(Wait::Event, Some(unit), out);
    let mut record = event_record(line, unit);
    record.text = cut(name, 64).to_owned();
    if code.is_none() {
        record.meaning = "an event without a name here";
    }
    merge(&mut record, false);
    state.wait(Wait::Event, record, out);
    if let Some(pending) = state.waiting(Wait::Event, Some(unit)) {
        pending.step = 5;
    }
    if !code.is_some_and(|code| matches!(code, 0x10..=0x13)) {
        state.complete(Wait::Event, Some(unit), out);
    }
    true
}

/// `unpriv data write s1 "Input address caused fault" stag: 0x0`.
fn syndrome(
    line: Line<'_>,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let (facts, class) = rest.split_once('"').unwrap_or((rest, ""));
    let fact = |name: &str| facts.split_ascii_whitespace().any(|word| word == name);
    let (class, end) = class.split_once('"').unwrap_or((class, ""));
    let fill = |record: &mut FaultRecord| {
        record.text = cut(class, 200).to_owned();
        if record.stage.is_some() {
            return;
        }
        record.access = match (fact("inst"), fact("read"), fact("write")) {
            (true, true, _) => FaultAccess::Execute,
            (_, true, _) => FaultAccess::Read,
            (.., true) => FaultAccess::Write,
            _ => FaultAccess::Unknown,
        };
        record.privileged = Some(fact("priv"));
        record.stage = Some(if fact("s2") { Stage::Two } else { Stage::One });
        record.flags.push(match class {
            "CD fetch" => "CLASS=CD",
            "Input address caused fault" => "CLASS=IN",
            _ if class.starts_with("Stage 1") => "CLASS=TT",
            _ => "CLASS=3",
        });
        if end.has(" stall") {
            record.flags.push("STALL");
        }
        if let Some(tag) = hex_after(end, "stag: ") {
            record.fields.push(("STAG", tag));
        }
    };
    if !state.join(Wait::Event, Some(unit), line, fill) {
        let mut record = event_record(line, unit);
        record.meaning = "an event whose first line is missing";
        fill(&mut record);
        State::emit(record, out);
        return true;
    }
    state.complete(Wait::Event, Some(unit), out);
    true
}

/// Errors of the unit and its queues.
fn error(
    line: Line<'_>,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let overflows = ["EVTQ overflow detected", "PRIQ overflow detected"];
    if overflows.iter().any(|words| rest.starts_with(words)) {
        out.push(LogEvent::Overflow(note(Some(Family::SmmuV3), line)));
        return true;
    }
    let unit_record = |meaning: &'static str, source: Citation| {
        let mut record = event_record(line, unit);
        record.meaning = meaning;
        record.class = Class::UnitError;
        record.certainty = Certainty::Certain;
        record.source = source;
        record.text = cut(rest.trim(), 200).to_owned();
        record
    };
    if let Some(rest) = after(rest, "unexpected global error reported (") {
        let mut record = unit_record("the unit reports an error of its own", GLOBAL);
        let active = hex(rest).map_or(0, |(active, _)| active as u32);
        record.code = Some(active);
        let set = ERRORS.iter().filter(|(bit, _)| active >> bit & 1 == 1);
        record.flags.extend(set.map(|(_, name)| *name));
        state.complete(Wait::Command, Some(unit), out);
        state.wait(Wait::Command, record, out);
        return true;
    }
    // Lines that say more of the error before; without it they are errors of their own.
    let further: &[(&str, &'static str, &'static str, Citation)] = &[
        (
            "device has entered Service Failure Mode",
            "SFM_ERR",
            "the unit has stopped (Service Failure Mode)",
            GLOBAL,
        ),
        (
            "GERROR MSI write aborted",
            "MSI_GERROR_ABT_ERR",
            "an interrupt of the unit could not be sent",
            GLOBAL,
        ),
        (
            "PRIQ MSI write aborted",
            "MSI_PRIQ_ABT_ERR",
            "an interrupt of the unit could not be sent",
            GLOBAL,
        ),
        (
            "EVTQ MSI write aborted",
            "MSI_EVENTQ_ABT_ERR",
            "an interrupt of the unit could not be sent",
            GLOBAL,
        ),
        (
            "CMDQ MSI write aborted",
            "MSI_CMDQ_ABT_ERR",
            "an interrupt of the unit could not be sent",
            GLOBAL,
        ),
        (
            "PRIQ write aborted",
            "PRIQ_ABT_ERR",
            "the PRI queue could not be written",
            GLOBAL,
        ),
        (
            "EVTQ write aborted",
            "EVENTQ_ABT_ERR",
            "the event queue could not be written",
            GLOBAL,
        ),
        (
            "CMDQ error (cons",
            "CMDQ_ERR",
            "the command queue has stopped at a command",
            COMMANDS,
        ),
    ];
    if let Some((_, name, meaning, source)) =
        further.iter().find(|(words, ..)| rest.starts_with(words))
    {
        let lost = name.starts_with("PRIQ_ABT") || name.starts_with("EVENTQ_ABT");
        if lost {
            out.push(LogEvent::Overflow(note(Some(Family::SmmuV3), line)));
        }
        let fill = |record: &mut FaultRecord| {
            record.name = name;
            record.meaning = meaning;
            record.text = cut(rest.trim(), 200).to_owned();
            if let Some(consumer) = hex_after(rest, "(cons ") {
                record.fields.push(("SMMU_CMDQ_CONS", consumer));
            }
        };
        let error = |pending: &FaultRecord| pending.flags.contains(name);
        let known = state
            .waiting(Wait::Command, Some(unit))
            .is_some_and(|pending| error(&pending.record));
        if known {
            state.join(Wait::Command, Some(unit), line, fill);
        } else {
            let mut record = unit_record(meaning, *source);
            fill(&mut record);
            state.complete(Wait::Command, Some(unit), out);
            state.wait(Wait::Command, record, out);
        }
        return true;
    }
    if rest.starts_with("retrying command fetch")
        || rest.starts_with("skipping command in error state")
    {
        state.join(Wait::Command, Some(unit), line, |_| {});
        return true;
    }
    let errors = [
        ("CMDQ timeout", "the command queue has had no room in time"),
        ("CMD_SYNC timeout", "a command has not completed in time"),
        ("GBPA not responding", REGISTER),
        ("failed to disable irqs", REGISTER),
        ("failed to clear cr0", REGISTER),
        ("failed to enable command queue", REGISTER),
        ("failed to enable event queue", REGISTER),
        ("failed to enable PRI queue", REGISTER),
        ("failed to enable ATS check", REGISTER),
        ("failed to enable SMMU interface", REGISTER),
    ];
    if let Some((_, meaning)) = errors.iter().find(|(words, _)| rest.starts_with(words)) {
        State::emit(unit_record(meaning, COMMANDS), out);
        return true;
    }
    // Nvidia's queues beside the unit.
    if rest.has("unexpected error reported. vintf_map")
        || rest.has("uncleared error detected")
        || rest.has("GERRORN=0x")
        || rest.starts_with("VINTF") && rest.has("able, STATUS=0x")
    {
        State::emit(
            unit_record("a command queue of the CMDQV reports an error", COMMANDS),
            out,
        );
        return true;
    }
    if rest.starts_with("unexpected PRI request received") {
        let mut record = event_record(line, unit);
        record.meaning = "a page request of a device whose driver takes none";
        record.class = Class::AtsRefused;
        record.certainty = Certainty::Likely;
        record.source = PAGE_REQUESTS;
        state.complete(Wait::PageRequest, Some(unit), out);
        state.wait(Wait::PageRequest, record, out);
        return true;
    }
    if let Some(rest) = starts(rest, "sid ") {
        let joined = state.join(Wait::PageRequest, Some(unit), line, |record| {
            page_request(record, rest)
        });
        state.complete(Wait::PageRequest, Some(unit), out);
        return joined;
    }
    false
}

/// `sid 0x00000008.0x00000: [1L] unprivileged RW access at iova 0x..`.
fn page_request(record: &mut FaultRecord, rest: &str) {
    let Some((id, rest)) = hex(rest) else {
        return;
    };
    record.id = Some(id);
    let pasid = rest.strip_prefix('.').and_then(hex).map(|(pasid, _)| pasid);
    record.pasid = small(pasid).filter(|pasid| *pasid != 0);
    record.privileged = Some(!rest.has("unprivileged"));
    let asked = after(rest, "privileged ")
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default();
    record.access = match asked {
        asked if asked.contains('X') => FaultAccess::Execute,
        asked if asked.contains('W') => FaultAccess::Write,
        asked if asked.contains('R') => FaultAccess::Read,
        _ => FaultAccess::Unknown,
    };
    let address = hex_after(rest, "at iova ");
    record.address = address.map(|value| Address {
        value,
        exact: false,
    });
}
