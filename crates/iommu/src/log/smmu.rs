//! SMMUv1 and v2 (`arm-smmu`), with Nvidia's and Qualcomm's variants, and Qualcomm's own units with the same
//! registers (`qcom-iommu`, `msm_iommu`).
//!
//! A context fault is a head with the registers and, since 6.9, lines that decode FSR and FSYNR0; before,
//! Qualcomm's kernels printed them in a form of their own. A global fault is a head and a line with the registers.

use super::reader::{Line, State, Wait};
use super::text::{Text as _, after, cut, device, head, hex, hex_after, number_after, pci, starts};
use super::{
    Address, Certainty, Citation, Class, Family, FaultAccess, FaultRecord, LogEvent, Stage,
};
use crate::codes::{self, Code};

/// FSR, with the names of its other bits.
const FSR: [(u32, &str); 12] = [
    (1, "TF"),
    (2, "AFF"),
    (3, "PF"),
    (4, "EF"),
    (5, "TLBMCF"),
    (6, "TLBLKF"),
    (7, "ASF"),
    (8, "UUT"),
    (30, "SS"),
    (31, "MULTI"),
    (9, "Format[0]"),
    (10, "Format[1]"),
];

const FSYNR0: [(u32, &str); 6] = [
    (4, "WNR"),
    (5, "PNU"),
    (6, "IND"),
    (8, "NSATTR"),
    (10, "PTWF"),
    (11, "AFR"),
];

const GFSR: [(u32, &str); 10] = [
    (0, "ICF"),
    (1, "USF"),
    (2, "SMCF"),
    (3, "UCBF"),
    (4, "UCIF"),
    (5, "CAF"),
    (6, "EF"),
    (7, "PF"),
    (8, "UUT"),
    (31, "MULTI"),
];

const SYNC: Citation = Citation {
    document: "Arm IHI 0062",
    section: "SMMU_sTLBGSTATUS",
};

const GPU: Citation = Citation {
    document: "Linux, drivers/gpu/drm/msm/adreno/adreno_gpu.c",
    section: "adreno_fault_handler",
};

pub(super) fn decode(line: Line<'_>, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    if let Some(rest) = after(line.text, "*** gpu fault: ") {
        return gpu(line, rest, out);
    }
    let Some((before, rest)) = head(line.text) else {
        return false;
    };
    let before = before.trim();
    let family = if before.starts_with("arm-smmu-v3") {
        return false;
    } else if before.starts_with("arm-smmu")
        || before.starts_with("qcom-tbu")
        || before.ends_with("smmu")
    {
        Family::SmmuV2
    } else if before.starts_with("msm_iommu") {
        return msm(line, rest, state, out);
    } else if before.starts_with("qcom-iommu") || before.starts_with("qcom_iommu") {
        Family::Qualcomm
    } else {
        return false;
    };
    let unit = device(before);
    context(line, family, unit, rest, state, out)
        || context_alone(line, family, unit, rest, state, out)
        || registers(line, unit, rest, state)
        || global(line, unit, rest, state, out)
        || lookup(line, family, unit, rest, state, out)
        || error(line, family, unit, rest, state, out)
}

fn new_record(line: Line<'_>, family: Family, unit: &str) -> FaultRecord {
    let mut record = FaultRecord::new(family, line);
    record.unit = Some(cut(unit, 64).to_owned());
    record
}

fn names<'n>(
    bits: &'n [(u32, &'static str)],
    value: u32,
) -> impl Iterator<Item = &'static str> + 'n {
    bits.iter()
        .filter(move |(bit, _)| value >> bit & 1 == 1)
        .map(|(_, name)| *name)
}

fn set_cause(record: &mut FaultRecord, table: &'static codes::CodeTable, status: u32) {
    record.source = table.source;
    record.code = Some(status);
    match crate::smmu::cause(table.codes, status) {
        Some(cause) => set(record, cause),
        None => record.meaning = "no cause among the bits of the status",
    }
}

fn set(record: &mut FaultRecord, cause: &'static Code) {
    record.name = cause.name();
    record.meaning = cause.meaning();
    record.class = cause.class;
    record.certainty = cause.certainty;
}

fn set_status(record: &mut FaultRecord, status: u32) {
    if record.field("FSR").is_some() {
        return;
    }
    record.fields.push(("FSR", status.into()));
    set_cause(record, &codes::SMMU_CONTEXT, status);
    // The format is a number, not two flags.
    record
        .flags
        .extend(names(FSR.get(..10).unwrap_or_default(), status));
}

fn set_syndrome(record: &mut FaultRecord, syndrome: u32) {
    if record.field("FSYNR0").is_some() {
        return;
    }
    record.fields.push(("FSYNR0", syndrome.into()));
    record.fields.push(("PLVL", (syndrome & 3).into()));
    record.flags.extend(names(&FSYNR0, syndrome));
    record.privileged = Some(syndrome >> 5 & 1 == 1);
    record.access = match (syndrome >> 4 & 1, syndrome >> 6 & 1) {
        (1, _) => FaultAccess::Write,
        (_, 1) => FaultAccess::Execute,
        _ => FaultAccess::Read,
    };
}

/// The stream id in CBFRSYNRA.
const fn stream(value: u64) -> u64 {
    value & 0xffff
}

/// The head of a context fault.
fn context(
    line: Line<'_>,
    family: Family,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let Some(rest) = after(rest, "nhandled context fault: ") else {
        return false;
    };
    let mut record = new_record(line, family, unit);
    record.source = codes::SMMU_CONTEXT.source;
    record.meaning = "a context fault whose status is missing";
    let value = |key: &str| hex_after(rest, key);
    let address = value("iova=");
    record.address = address.map(|value| Address { value, exact: true });
    if let Some(status) = value("fsr=") {
        set_status(&mut record, status as u32);
    }
    if let Some(syndrome) = value("fsynr=").or_else(|| value("fsynr0=")) {
        set_syndrome(&mut record, syndrome as u32);
    }
    record.id = value("cbfrsynra=").map(stream);
    if let Some(bank) = number_after(rest, " cb=") {
        record.fields.push(("context bank", bank));
    }
    state.complete(Wait::Context, Some(unit), out);
    state.wait(Wait::Context, record, out);
    true
}

/// The head of a context fault in Qualcomm's kernels, whose registers follow one a line.
fn context_alone(
    line: Line<'_>,
    family: Family,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let Some(rest) = after(rest, "nhandled arm-smmu context fault") else {
        return false;
    };
    let Some(client) = starts(rest, "from ") else {
        // The last line of an older form: "Unhandled arm-smmu context fault!".
        return state.join(Wait::Context, Some(unit), line, |_| {});
    };
    let mut record = new_record(line, family, unit);
    record.source = codes::SMMU_CONTEXT.source;
    record.meaning = "a context fault whose status is missing";
    record.client = Some(cut(client.trim_end().trim_end_matches('!'), 64).to_owned());
    state.complete(Wait::Context, Some(unit), out);
    state.wait(Wait::Context, record, out);
    true
}

/// Lines behind the head of a context fault.
fn registers(line: Line<'_>, unit: &str, rest: &str, state: &mut State) -> bool {
    let value = |key: &str| {
        let rest = starts(rest, key)?.trim_start().strip_prefix('=')?;
        Some(hex(rest)?.0)
    };
    if let Some(status) = value("FSR") {
        return state.join(Wait::Context, Some(unit), line, |record| {
            set_status(record, status as u32);
            record.id = record.id.or_else(|| hex_after(rest, "SID=").map(stream));
        });
    }
    if let Some(syndrome) = value("FSYNR0").or_else(|| value("FSYNR")) {
        return state.join(Wait::Context, Some(unit), line, |record| {
            set_syndrome(record, syndrome as u32)
        });
    }
    let keys = [
        "FAR",
        "PAR",
        "TTBR0",
        "TTBR1",
        "SCTLR",
        "ACTLR",
        "CONTEXTIDR",
        "FSYNR1",
        "PTE",
        "SID",
        "context bank#",
    ];
    for key in keys {
        if let Some(value) = value(key) {
            return state.join(Wait::Context, Some(unit), line, |record| match key {
                "SID" => record.id = record.id.or(Some(stream(value))),
                "FAR" => {
                    let address = Address { value, exact: true };
                    record.address = record.address.or(Some(address));
                }
                key => record.fields.push((key, value)),
            });
        }
    }
    let soft = hex_after(rest, "soft iova-to-phys=");
    if let Some(address) = soft {
        return state.join(Wait::Context, Some(unit), line, |record| {
            record.fields.push(("soft iova-to-phys", address));
        });
    }
    if rest.has("iova-to-phys") {
        let address = hex_after(rest, "(ATOS)=");
        return state.join(Wait::Context, Some(unit), line, |record| {
            record
                .fields
                .extend(address.map(|address| ("hard iova-to-phys", address)));
        });
    }
    if let Some(rest) = after(rest, "SOFTWARE TABLE WALK FAILED! Looks like ") {
        return state.join(Wait::Context, Some(unit), line, |record| {
            let client = rest.split(" accessed").next().unwrap_or_default();
            if let Some((device, "")) = pci(client) {
                record.pci = Some(device);
                return;
            }
            record.client = record
                .client
                .take()
                .or_else(|| Some(cut(client, 64).to_owned()));
        });
    }
    false
}

/// A global fault.
fn global(
    line: Line<'_>,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    let unknown = after(rest, "Blocked unknown Stream ID ");
    if unknown.is_some() || rest.starts_with("Unexpected global fault") {
        let mut record = new_record(line, Family::SmmuV2, unit);
        record.source = codes::SMMU_GLOBAL.source;
        record.meaning = "a global fault whose status is missing";
        if let Some(rest) = unknown {
            // The driver prints this for USF only.
            set_cause(&mut record, &codes::SMMU_GLOBAL, 1 << 1);
            record.id = hex(rest).map(|(id, _)| id & 0xffff);
        }
        state.complete(Wait::Global, Some(unit), out);
        state.wait(Wait::Global, record, out);
        return true;
    }
    let Some(status) = starts(rest, "GFSR ").and_then(hex) else {
        return false;
    };
    let status = status.0 as u32;
    let fill = |record: &mut FaultRecord| {
        set_cause(record, &codes::SMMU_GLOBAL, status);
        record.flags.extend(names(&GFSR, status));
        for key in ["GFSYNR0", "GFSYNR1", "GFSYNR2"] {
            if let Some(value) = hex_after(rest, key) {
                record.fields.push((key, value));
            }
        }
        record.id = record.id.or_else(|| record.field("GFSYNR1").map(stream));
        if let Some(syndrome) = record.field("GFSYNR0") {
            // WNR, PNU and IND, in faults of requests.
            if crate::smmu::cause(codes::SMMU_GLOBAL.codes, status).is_some() {
                record.access = match (syndrome >> 1 & 1, syndrome >> 3 & 1) {
                    (1, _) => FaultAccess::Write,
                    (_, 1) => FaultAccess::Execute,
                    _ => FaultAccess::Read,
                };
            }
        }
    };
    if !state.join(Wait::Global, Some(unit), line, fill) {
        let mut record = new_record(line, Family::SmmuV2, unit);
        fill(&mut record);
        State::emit(record, out);
        return true;
    }
    state.complete(Wait::Global, Some(unit), out);
    true
}

/// A translation that the driver has asked the unit for, and that has faulted: no device has.
fn lookup(
    line: Line<'_>,
    family: Family,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    if !rest.starts_with("translation fault!") {
        return false;
    }
    let mut record = new_record(line, family, unit);
    record.meaning = "a translation that the driver has asked for has faulted";
    record.source = LOOKUP;
    state.complete(Wait::Context, Some(unit), out);
    state.wait(Wait::Context, record, out);
    true
}

const LOOKUP: Citation = Citation {
    document: "Arm IHI 0062",
    section: "SMMU_CBn_ATS1PR, SMMU_CBn_PAR",
};

/// Errors of the unit.
fn error(
    line: Line<'_>,
    family: Family,
    unit: &str,
    rest: &str,
    state: &mut State,
    out: &mut Vec<LogEvent>,
) -> bool {
    if rest.starts_with("TBU: power_status") && state.join(Wait::Sync, Some(unit), line, |_| {}) {
        state.complete(Wait::Sync, Some(unit), out);
        return true;
    }
    let errors = [
        (
            "TLB sync timed out",
            "an invalidation has not completed in time",
        ),
        (
            "timeout waiting for TLB SYNC",
            "an invalidation has not completed in time",
        ),
        (
            "TBU: power_status",
            "the state of a translation buffer after a time-out",
        ),
        (
            "Timeout while trying to halt TBU",
            "a translation buffer has not stopped in time",
        ),
        (
            "ATOS generated a fault interrupt",
            "a translation by hardware has faulted",
        ),
        (
            "ATOS translation timed out",
            "a translation by hardware has not completed in time",
        ),
        (
            "ATOS results differed across TLBIALL",
            "a translation by hardware differs after an invalidation",
        ),
        (
            "iova to phys timed out",
            "a translation by hardware has not completed in time",
        ),
    ];
    let Some((_, meaning)) = errors.iter().find(|(words, _)| rest.starts_with(words)) else {
        return false;
    };
    let mut record = new_record(line, family, unit);
    record.meaning = meaning;
    record.class = Class::UnitError;
    record.certainty = Certainty::Certain;
    record.source = SYNC;
    record.id = hex_after(rest, "SID=");
    record.text = cut(rest.trim(), 200).to_owned();
    if rest.starts_with("TLB sync timed out") {
        state.complete(Wait::Sync, Some(unit), out);
        state.wait(Wait::Sync, record, out);
    } else {
        State::emit(record, out);
    }
    true
}

/// Lines of `msm_iommu`, which name no device.
fn msm(line: Line<'_>, rest: &str, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    const SOURCE: Citation = Citation {
        document: "Linux, drivers/iommu/msm_iommu.c",
        section: "msm_iommu_fault_handler",
    };
    if rest.starts_with("Unexpected IOMMU page fault") {
        state.complete(Wait::Msm, None, out);
        let mut record = FaultRecord::new(Family::Qualcomm, line);
        record.meaning = "a page fault whose registers are missing";
        record.source = SOURCE;
        state.wait(Wait::Msm, record, out);
        return true;
    }
    if let Some(bank) = number_after(rest, "Fault occurred in context ") {
        // Each context has a record of its own; the first belongs to the head.
        let first = state
            .waiting(Wait::Msm, None)
            .is_some_and(|pending| pending.step == 0);
        if !first {
            state.complete(Wait::Msm, None, out);
            let mut record = FaultRecord::new(Family::Qualcomm, line);
            record.source = SOURCE;
            state.wait(Wait::Msm, record, out);
        }
        if let Some(pending) = state.waiting(Wait::Msm, None) {
            pending.step = 1;
            if first {
                pending.add(line);
            }
            pending.record.fields.push(("context bank", bank));
        }
        return true;
    }
    if let Some((base, _)) = starts(rest, "base = ").and_then(hex) {
        state.join(Wait::Msm, None, line, |record| {
            record.fields.push(("base", base))
        });
        return true;
    }
    if rest.starts_with("Interesting registers") {
        state.join(Wait::Msm, None, line, |_| {});
        return true;
    }
    let value = |key: &str| {
        let (before, rest) = rest.around(key)?;
        let rest = rest.trim_start().strip_prefix('=')?;
        (before.is_empty() || before.ends_with(' '))
            .then(|| hex(rest))?
            .map(|(value, _)| value)
    };
    let keys = [
        "FAR", "PAR", "FSR", "FSYNR0", "FSYNR1", "TTBR0", "TTBR1", "SCTLR", "ACTLR",
    ];
    let found = keys.map(|key| value(key).map(|value| (key, value)));
    if found.iter().all(Option::is_none) {
        return false;
    }
    state.join(Wait::Msm, None, line, |record| {
        for (key, value) in found.into_iter().flatten() {
            match key {
                "FAR" => record.address = Some(Address { value, exact: true }),
                "FSR" => {
                    set_status(record, value as u32);
                    record.source = SOURCE;
                    // Not Arm's architecture, though its first bits are the same.
                    if record.certainty == Certainty::Certain {
                        record.certainty = Certainty::Likely;
                    }
                }
                "FSYNR0" => set_syndrome(record, value as u32),
                _ => record.fields.push((key, value)),
            }
        }
    });
    true
}

/// Qualcomm's graphics driver, which handles the faults of its own context bank.
fn gpu(line: Line<'_>, rest: &str, out: &mut Vec<LogEvent>) -> bool {
    let mut record = FaultRecord::new(Family::SmmuV2, line);
    record.client = Some("gpu".to_owned());
    record.source = GPU;
    record.stage = Some(Stage::One);
    let address = hex_after(rest, "iova=");
    record.address = address.map(|value| Address { value, exact: true });
    record.access = if rest.has("dir=WRITE") {
        FaultAccess::Write
    } else if rest.has("dir=READ") {
        FaultAccess::Read
    } else {
        FaultAccess::Unknown
    };
    let kinds = [
        ("type=TRANSLATION", 1),
        ("type=PERMISSION", 3),
        ("type=EXTERNAL", 4),
    ];
    let kind = kinds.iter().find(|(words, _)| rest.has(words));
    record.meaning = "a fault of the graphics processor";
    if let Some(cause) = kind.and_then(|(_, bit)| codes::SMMU_CONTEXT.get(1 << bit)) {
        set(&mut record, cause);
    }
    if let Some(root) = hex_after(rest, "ttbr0=") {
        record.fields.push(("TTBR0", root));
    }
    record.text = cut(rest.trim(), 200).to_owned();
    State::emit(record, out);
    true
}
