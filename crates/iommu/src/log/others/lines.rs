//! Drivers that print a fault on several lines: Rockchip, Allwinner, Exynos, Tegra, PAMU.

use super::super::reader::{State, Wait};
use super::super::text::{Text as _, after, cut, hex, hex_after, number_after, starts};
use super::super::{Address, Certainty, Class, Family, FaultAccess, FaultRecord, LogEvent};
use super::{ALLWINNER, EXYNOS, Message, PAMU, ROCKCHIP, TEGRA, direction, occurred};

impl Message<'_> {
    pub(super) fn rockchip(&self, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
        let unit = Some(self.unit);
        if let Some(rest) = starts(self.rest, "Page fault at ") {
            let mut record = self.record(Family::Rockchip, ROCKCHIP);
            record.meaning = "not present, or not allowed";
            record.class = Class::NoAccess;
            record.certainty = Certainty::Certain;
            record.address = hex(rest).map(|(value, _)| Address { value, exact: true });
            record.access = direction(after(rest, "of type ").unwrap_or_default());
            state.complete(Wait::Walk, unit, out);
            state.wait(Wait::Walk, record, out);
            return true;
        }
        if starts(self.rest, "iova = ").is_some() {
            return state.join(Wait::Walk, unit, self.line, |_| {});
        }
        if let Some(rest) = starts(self.rest, "mmu_dte_addr: ") {
            let joined = state.join(Wait::Walk, unit, self.line, |record| {
                let entries = [("dte", "dte valid", "dte@"), ("pte", "pte valid", "pte@")];
                for (name, valid, key) in entries {
                    let Some(entry) = after(rest, key).and_then(|rest| after(rest, ": ")) else {
                        continue;
                    };
                    if let Some((value, _)) = hex(entry) {
                        record.fields.push((name, value));
                    }
                    if let Some(bit) = number_after(entry, "valid: ") {
                        record.fields.push((valid, bit));
                    }
                }
                if let Some(flags) = hex_after(rest, "flags: ") {
                    record.fields.push(("page flags", flags));
                }
            });
            return joined;
        }
        if starts(self.rest, "Page fault while iommu not attached to domain").is_some() {
            let joined = state.join(Wait::Walk, unit, self.line, |record| {
                record.flags.push("not attached")
            });
            state.complete(Wait::Walk, unit, out);
            return joined;
        }
        if let Some(rest) = starts(self.rest, "BUS_ERROR occurred at ") {
            let mut record = self.record(Family::Rockchip, ROCKCHIP);
            record.name = "BUS_ERROR";
            record.meaning = "a table cannot be read";
            record.class = Class::BadTable;
            record.certainty = Certainty::Likely;
            record.address = hex(rest).map(|(value, _)| Address { value, exact: true });
            State::emit(record, out);
            return true;
        }
        let errors = [
            (
                "Enable stall request timed out",
                "the unit has not stalled in time",
            ),
            (
                "Disable stall request timed out",
                "the unit has not gone on in time",
            ),
            (
                "Enable paging request timed out",
                "the unit has not begun to translate in time",
            ),
            (
                "Disable paging request timed out",
                "the unit has not ended translating in time",
            ),
            (
                "Error during raw reset",
                "the unit does not keep a register's value",
            ),
            (
                "FORCE_RESET command timed out",
                "the unit has not been reset in time",
            ),
            ("unexpected int_status", "an interrupt without a name"),
        ];
        self.error(Family::Rockchip, ROCKCHIP, &errors, out)
    }

    pub(super) fn allwinner(&self, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
        let unit = Some(self.unit);
        if let Some(rest) = starts(self.rest, "Page fault for ") {
            let mut record = self.record(Family::Allwinner, ALLWINNER);
            record.meaning = "not present, or not allowed";
            record.class = Class::NoAccess;
            record.certainty = Certainty::Certain;
            record.address = hex(rest).map(|(value, _)| Address { value, exact: true });
            record.id = number_after(rest, "master ");
            record.access = direction(after(rest, "dir ").unwrap_or_default());
            state.complete(Wait::Walk, unit, out);
            state.wait(Wait::Walk, record, out);
            return true;
        }
        if starts(
            self.rest,
            "Page fault while iommu not attached to any domain",
        )
        .is_some()
        {
            let joined = state.join(Wait::Walk, unit, self.line, |record| {
                record.flags.push("not attached")
            });
            state.complete(Wait::Walk, unit, out);
            return joined;
        }
        let errors = [
            (
                "TLB invalidation timed out",
                "an invalidation has not completed in time",
            ),
            (
                "PTW cache invalidation timed out",
                "an invalidation has not completed in time",
            ),
            (
                "TLB Flush timed out",
                "an invalidation has not completed in time",
            ),
        ];
        self.error(Family::Allwinner, ALLWINNER, &errors, out)
    }

    pub(super) fn exynos(&self, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
        let errors = [("Unhandled interrupt bit", "an interrupt without a name")];
        if self.error(Family::Exynos, EXYNOS, &errors, out) {
            return true;
        }
        let Some((kind, rest)) = occurred(self.rest) else {
            return false;
        };
        let mut record = self.record(Family::Exynos, EXYNOS);
        record.address = hex(rest).map(|(value, _)| Address { value, exact: true });
        // "12340000.codec: [READ] PAGE"; in kernels before 4.11 only "PAGE".
        let (client, kind) = kind
            .around(": [")
            .map_or((None, kind), |(client, kind)| (Some(client), kind));
        record.client = client.map(|client| cut(client.trim(), 64).to_owned());
        let (access, kind) = kind.around("] ").unwrap_or(("", kind));
        // AR and AW are the bus's channels of reads and writes.
        record.access = match kind.trim() {
            kind if kind.starts_with("AR ") => FaultAccess::Read,
            kind if kind.starts_with("AW ") => FaultAccess::Write,
            _ => direction(access),
        };
        let kinds: [(&str, &str, Class); 9] = [
            ("PTW", "a table cannot be read", Class::BadTable),
            ("PAGE", "not present", Class::NotMapped),
            (
                "AR MULTI-HIT",
                "two cached translations match",
                Class::Unknown,
            ),
            (
                "AW MULTI-HIT",
                "two cached translations match",
                Class::Unknown,
            ),
            ("MULTI-HIT", "two cached translations match", Class::Unknown),
            ("BUS ERROR", "a table cannot be read", Class::BadTable),
            ("ACCESS PROTECTION", "not allowed", Class::Permission),
            (
                "SECURITY PROTECTION",
                "the page is not one of this world",
                Class::Permission,
            ),
            ("RESERVED", "an interrupt without a name", Class::Unknown),
        ];
        let known = kinds.iter().find(|(name, ..)| kind.trim().ends_with(name));
        match known {
            Some((name, meaning, class)) => {
                record.name = name;
                record.meaning = meaning;
                record.class = *class;
                if *class != Class::Unknown {
                    record.certainty = Certainty::Likely;
                }
            }
            None => record.meaning = "a fault without a name",
        }
        state.complete(Wait::Panic, None, out);
        state.wait(Wait::Panic, record, out);
        true
    }

    pub(super) fn tegra(&self, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
        // CLIENT: [secure ]read @0x1000: STATUS (TYPE [RWS])
        let Some((client, rest)) = self.rest.around(": ") else {
            return false;
        };
        let (secure, rest) = starts(rest, "secure ").map_or((false, rest), |rest| (true, rest));
        let Some((access, rest)) = rest.around(" @") else {
            return false;
        };
        let Some((value, rest)) = hex(rest) else {
            return false;
        };
        let status = rest.strip_prefix(": ").unwrap_or(rest);
        let mut record = self.record(Family::Tegra, TEGRA);
        record.client = Some(cut(client, 64).to_owned());
        record.address = Some(Address { value, exact: true });
        record.access = direction(access);
        if secure {
            record.flags.push("secure");
        }
        record.text = cut(status.trim(), 200).to_owned();
        if status.has("SMMU translation error") || status.starts_with("Page fault") {
            record.name = "SMMU translation error";
            record.meaning = "not present, or not allowed";
            record.class = Class::NoAccess;
            record.certainty = Certainty::Likely;
        } else {
            record.meaning = "an error of the memory controller, not of the SMMU";
        }
        // The controller reports a fault of the SMMU twice: as an address without memory, then as a fault.
        if !status.has("SMMU translation error") {
            State::emit(record, out);
            return true;
        }
        let same = |first: &FaultRecord| {
            first.client == record.client
                && first.address == record.address
                && first.access == record.access
        };
        let unit = Some(self.unit);
        let second = status.starts_with("Page fault");
        let first = state.waiting(Wait::Status, unit);
        if second && first.is_some_and(|pending| same(&pending.record)) {
            state.join(Wait::Status, unit, self.line, |_| {});
            state.complete(Wait::Status, unit, out);
        } else if second {
            state.complete(Wait::Status, unit, out);
            State::emit(record, out);
        } else {
            state.complete(Wait::Status, unit, out);
            state.wait(Wait::Status, record, out);
        }
        true
    }

    pub(super) fn pamu(&self, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
        // "fsl-pamu: pamu_av_isr: ", then the message.
        let rest = starts(self.rest, "pamu_av_isr: ").unwrap_or(self.rest);
        if rest.starts_with("access violation interrupt") {
            state.complete(Wait::Pamu, None, out);
            let mut record = self.record(Family::Pamu, PAMU);
            record.unit = None;
            record.meaning = "not present, or not allowed";
            record.class = Class::NoAccess;
            record.certainty = Certainty::Likely;
            state.wait(Wait::Pamu, record, out);
            return true;
        }
        let keys = [
            "POES1", "POES2", "AVS1", "AVS2", "AVA", "UDAD", "POEA", "PAACE[0]", "PAACE[1]",
            "PAACE[2]", "PAACE[3]",
        ];
        for key in keys {
            let Some((value, _)) = starts(rest, key).and_then(|rest| hex(rest.strip_prefix('=')?))
            else {
                continue;
            };
            return state.join(Wait::Pamu, None, self.line, |record| {
                record.fields.push((key, value));
                match key {
                    "AVS1" => record.id = Some(value >> 16),
                    "AVA" => record.address = Some(Address { value, exact: true }),
                    _ => {}
                }
            });
        }
        if rest.starts_with("Disabling liodn") {
            let joined = state.join(Wait::Pamu, None, self.line, |record| {
                record.flags.push("disabled")
            });
            state.complete(Wait::Pamu, None, out);
            return joined;
        }
        false
    }
}
