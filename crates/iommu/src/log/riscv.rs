//! The RISC-V IOMMU (`riscv-iommu`, `riscv,iommu`). Both values are hexadecimal without `0x`, the cause is decimal.

use super::reader::{Line, State, note};
use super::text::{Text as _, cut, device, head, hex_after, number, number_after, starts};
use super::{
    Address, Certainty, Citation, Class, Family, FaultAccess, FaultRecord, LogEvent, Stage,
};
use crate::codes;

const QUEUES: Citation = Citation {
    document: "RISC-V IOMMU specification",
    section: "Command-Queue (CQ); Fault/Event-Queue (FQ)",
};

pub(super) fn decode(line: Line<'_>, out: &mut Vec<LogEvent>) -> bool {
    let Some((before, rest)) = head(line.text) else {
        return false;
    };
    let before = before.trim();
    let named = before.starts_with("riscv-iommu")
        || before.starts_with("riscv,iommu")
        || before.starts_with("riscv_iommu");
    let mut record = FaultRecord::new(Family::Riscv, line);
    record.unit = Some(cut(device(before), 64).to_owned());
    record.text = cut(rest.trim(), 200).to_owned();
    if let Some(fault) = starts(rest, "Fault ") {
        let (Some((cause, _)), Some(id)) = (number(fault), hex_after(fault, "devid:")) else {
            return false;
        };
        let (Some(value), second) = (hex_after(fault, "iotval:"), hex_after(fault, "iotval2:"))
        else {
            return false;
        };
        fill(&mut record, (cause, id), (value, second));
        State::emit(record, out);
        return true;
    }
    if !named {
        return false;
    }
    if rest.starts_with("Queue #") && rest.has("error;") {
        if number_after(rest, "overflow:") == Some(1) {
            out.push(LogEvent::Overflow(note(Some(Family::Riscv), line)));
        }
        let lost = number_after(rest, "memory fault:");
        if lost == Some(0) {
            return true;
        }
        let flags = [
            ("memory fault:", "fqmf"),
            (" timeout:", "cmd_to"),
            (" illegal:", "cmd_ill"),
            ("fence_w_ip:", "fence_w_ip"),
        ];
        let set = flags
            .iter()
            .filter(|(key, _)| number_after(rest, key) == Some(1));
        record.flags.extend(set.map(|(_, name)| *name));
        if lost.is_none() && number_after(rest, " fault:") == Some(1) {
            record.flags.push("cqmf");
        }
        record.meaning = match record.flags.first() {
            Some(&"fqmf") => "the fault queue could not be written",
            Some(&"cmd_to") => "a device has not answered an invalidation in time",
            Some(&"cmd_ill") => "the command queue has stopped at a command",
            Some(&"cqmf") => "the command queue could not be read",
            _ => "a queue has reported an error",
        };
    } else if rest.starts_with("Hardware error: ") || rest.starts_with("timeout when setting ddtp")
    {
        record.meaning = if rest.has("queue access timeout") {
            "a queue has had no room in time"
        } else if rest.has("execution timeout") {
            "a command has not completed in time"
        } else if rest.has("ddtp") {
            "the unit has not taken over a register in time"
        } else {
            "a command could not be given"
        };
    } else if rest.starts_with("fail to disable hardware queue") || rest.has("failed to start") {
        record.meaning = "a queue has not changed its state in time";
    } else if rest.starts_with("DDTP update failed") || rest.starts_with("DDTP hw mode") {
        record.meaning = "the unit has not taken over the device directory";
    } else {
        return false;
    }
    record.class = Class::UnitError;
    record.certainty = Certainty::Certain;
    record.source = QUEUES;
    State::emit(record, out);
    true
}

fn fill(record: &mut FaultRecord, (cause, id): (u64, u64), (value, second): (u64, Option<u64>)) {
    record.source = codes::RISCV.source;
    record.code = u32::try_from(cause).ok();
    record.id = Some(id);
    record.meaning = "a cause without a name here";
    if let Some(code) = record.code.and_then(|code| codes::RISCV.get(code)) {
        record.name = code.name();
        record.meaning = code.meaning();
        record.class = code.class;
        record.certainty = code.certainty;
    }
    record.access = match cause {
        1 | 12 | 20 => FaultAccess::Execute,
        4 | 5 | 13 | 21 => FaultAccess::Read,
        6 | 7 | 15 | 23 => FaultAccess::Write,
        _ => FaultAccess::Unknown,
    };
    record.stage = match cause {
        12 | 13 | 15 => Some(Stage::One),
        20 | 21 | 23 => Some(Stage::Two),
        _ => None,
    };
    // Causes of a request have its address there.
    record.address = Some(Address { value, exact: true });
    record.fields.push(("iotval", value));
    if let Some(second) = second {
        record.fields.push(("iotval2", second));
        if record.stage == Some(Stage::Two) {
            record.ipa = Some(second & !3);
        }
    }
}
