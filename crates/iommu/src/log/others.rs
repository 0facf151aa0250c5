//! Units without a public specification, or with one of their own: DART, Rockchip, Allwinner, MediaTek, Exynos, Tegra,
//! IPMMU, OMAP, virtio, Verisilicon, PAMU.
//!
//! Meaning and class follow from the driver where no specification is public: they are likely, not certain, but for
//! those whose tables the driver itself names in the message.

mod lines;

use super::reader::{Line, State, Wait, note};
use super::text::{
    Text as _, after, cut, device, head, hex, hex_after, number, number_after, small, starts,
};
use super::{Address, Certainty, Citation, Class, Family, FaultAccess, FaultRecord, LogEvent};

macro_rules! sources {
    ($($name:ident = $document:literal, $section:literal;)*) => {
        $(const $name: Citation = Citation { document: $document, section: $section };)*
    };
}

sources! {
    DART = "Linux, drivers/iommu/apple-dart.c", "apple_dart_t8020_irq, apple_dart_t8110_irq";
    ROCKCHIP = "Linux, drivers/iommu/rockchip-iommu.c", "rk_iommu_irq";
    ALLWINNER = "Linux, drivers/iommu/sun50i-iommu.c", "sun50i_iommu_irq";
    MEDIATEK = "Linux, drivers/iommu/mtk_iommu.c", "mtk_iommu_isr";
    EXYNOS = "Linux, drivers/iommu/exynos-iommu.c", "exynos_sysmmu_irq";
    TEGRA = "Linux, drivers/memory/tegra/mc.c", "tegra30_mc_handle_irq";
    IPMMU = "Linux, drivers/iommu/ipmmu-vmsa.c", "ipmmu_domain_irq";
    OMAP = "Linux, drivers/iommu/omap-iommu.c", "iommu_fault_handler";
    VIRTIO = "virtio specification", "5.13.6.9 Fault reporting";
    VERISILICON = "Linux, drivers/iommu/vsi-iommu.c", "vsi_iommu_irq";
    PAMU = "Linux, drivers/iommu/fsl_pamu.c", "pamu_av_isr";
}

pub(super) fn decode(line: Line<'_>, state: &mut State, out: &mut Vec<LogEvent>) -> bool {
    if line.text.has("Unrecoverable System MMU Fault") {
        // The record before says which fault it was; the kernel has stopped for it.
        if state.join(Wait::Panic, None, line, |record| record.flags.push("panic")) {
            state.complete(Wait::Panic, None, out);
            return true;
        }
        let mut record = FaultRecord::new(Family::Exynos, line);
        record.meaning = "the kernel has stopped for a fault that no driver handles";
        record.source = EXYNOS;
        State::emit(record, out);
        return true;
    }
    // Kernels before 4.0 name the unit behind the address.
    if let Some((_, rest)) = occurred(line.text).filter(|(kind, _)| !kind.has(": ")) {
        let by = after(rest, " by ").and_then(|rest| rest.split('(').next());
        let message = Message {
            line,
            unit: by.unwrap_or_default(),
            rest: line.text,
        };
        return rest.has("Page table base") && message.exynos(state, out);
    }
    let Some((before, rest)) = head(line.text) else {
        return false;
    };
    let before = before.trim();
    let message = Message {
        line,
        unit: device(before),
        rest,
    };
    let is = |names: &[&str]| names.iter().any(|name| before.starts_with(name));
    if rest.starts_with("translation fault: status:") || is(&["apple-dart"]) {
        message.dart(out)
    } else if is(&["rk_iommu", "rockchip-iommu", "rk-iommu"]) {
        message.rockchip(state, out)
    } else if is(&["sun50i-iommu"]) {
        message.allwinner(state, out)
    } else if is(&["mtk-iommu", "mtk_iommu", "mtk-m4u", "mtk-iommu-v1"]) {
        message.mediatek(out)
    } else if is(&["exynos-sysmmu", "exynos-iommu"]) {
        message.exynos(state, out)
    } else if is(&["tegra-mc", "tegra-smmu"]) || before.ends_with(".memory-controller") {
        message.tegra(state, out)
    } else if is(&["ipmmu-vmsa"]) {
        message.ipmmu(out)
    } else if is(&["omap-iommu"]) {
        message.omap(out)
    } else if is(&["virtio_iommu", "virtio-iommu", "viommu"]) {
        message.virtio(out)
    } else if is(&["vsi-iommu", "vsi_iommu"]) {
        message.verisilicon(out)
    } else if is(&["fsl-pamu"]) {
        message.pamu(state, out)
    } else if is(&["sprd-iommu", "sprd_iommu"]) {
        message.sprd(out)
    } else {
        false
    }
}

/// Message of a driver.
#[derive(Clone, Copy)]
struct Message<'t> {
    line: Line<'t>,
    unit: &'t str,
    rest: &'t str,
}

impl Message<'_> {
    fn record(&self, family: Family, source: Citation) -> FaultRecord {
        let mut record = FaultRecord::new(family, self.line);
        record.unit = Some(cut(self.unit, 64).to_owned());
        record.source = source;
        record.text = cut(self.rest.trim(), 200).to_owned();
        record
    }

    /// An error of the unit, if the message begins with one of these.
    fn error(
        &self,
        family: Family,
        source: Citation,
        errors: &[(&str, &'static str)],
        out: &mut Vec<LogEvent>,
    ) -> bool {
        let Some((_, meaning)) = errors
            .iter()
            .find(|(words, _)| self.rest.starts_with(words))
        else {
            return false;
        };
        let mut record = self.record(family, source);
        record.meaning = meaning;
        record.class = Class::UnitError;
        record.certainty = Certainty::Certain;
        if let Some(status) =
            hex_after(self.rest, "status: ").or_else(|| hex_after(self.rest, "int_status: "))
        {
            record.fields.push(("status", status));
        }
        State::emit(record, out);
        true
    }

    fn dart(&self, out: &mut Vec<LogEvent>) -> bool {
        use Class::{DeviceEntry, NotMapped, Permission, Unknown};
        let Some(rest) = starts(self.rest, "translation fault: ") else {
            let errors = [(
                "busy bit did not clear",
                "an invalidation has not completed in time",
            )];
            return self.error(Family::Dart, DART, &errors, out);
        };
        let mut record = self.record(Family::Dart, DART);
        record.code = small(hex_after(rest, "code:"));
        record.id = number_after(rest, "stream:");
        if let Some(status) = hex_after(rest, "status:") {
            record.fields.push(("status", status));
        }
        let address = hex_after(rest, ") at ");
        record.address = address.map(|value| Address { value, exact: true });
        let kinds = [
            (
                "NO PTE",
                "NO PTE FOR IOVA",
                "not present at the last level",
                NotMapped,
                Certainty::Certain,
            ),
            (
                "NO PMD",
                "NO PMD FOR IOVA",
                "not present at an upper level",
                NotMapped,
                Certainty::Certain,
            ),
            (
                "NO PGD",
                "NO PGD FOR IOVA",
                "not present at the first level",
                NotMapped,
                Certainty::Certain,
            ),
            (
                "NO TTBR",
                "NO TTBR FOR IOVA",
                "the stream has no table",
                DeviceEntry,
                Certainty::Likely,
            ),
            (
                "READ FAULT",
                "READ FAULT",
                "reading is not allowed",
                Permission,
                Certainty::Likely,
            ),
            (
                "WRITE FAULT",
                "WRITE FAULT",
                "writing is not allowed",
                Permission,
                Certainty::Likely,
            ),
        ];
        let kind = after(rest, "(")
            .and_then(|rest| rest.split(')').next())
            .unwrap_or_default();
        match kinds.iter().find(|(words, ..)| kind.starts_with(words)) {
            Some((_, name, meaning, class, certainty)) => {
                record.name = name;
                record.meaning = meaning;
                record.class = *class;
                record.certainty = *certainty;
            }
            None => {
                record.meaning = "a code without a name";
                record.class = Unknown;
            }
        }
        record.access = match kind {
            "READ FAULT" => FaultAccess::Read,
            "WRITE FAULT" => FaultAccess::Write,
            _ => FaultAccess::Unknown,
        };
        State::emit(record, out);
        true
    }

    fn mediatek(&self, out: &mut Vec<LogEvent>) -> bool {
        let Some(rest) = starts(self.rest, "fault type=") else {
            let errors = [(
                "Partial TLB flush timed out",
                "an invalidation has not completed in time",
            )];
            return self.error(Family::MediaTek, MEDIATEK, &errors, out);
        };
        let mut record = self.record(Family::MediaTek, MEDIATEK);
        record.meaning = "not present, or not allowed";
        record.class = Class::NoAccess;
        record.certainty = Certainty::Likely;
        record.code = hex(rest).and_then(|(kind, _)| small(Some(kind)));
        let address = hex_after(rest, " iova=");
        record.address = address.map(|value| Address {
            value,
            exact: false,
        });
        record.id = hex_after(rest, "master=");
        let places = [
            (" pa=", "pa"),
            ("larb=", "larb"),
            ("port=", "port"),
            ("layer=", "layer"),
        ];
        for (key, name) in places {
            let value = if name == "pa" {
                hex_after(rest, key)
            } else {
                number_after(rest, key)
            };
            if let Some(value) = value {
                record.fields.push((name, value));
            }
        }
        if let (Some(larb), Some(port)) = (record.field("larb"), record.field("port")) {
            record.client = Some(format!("larb {larb} port {port}"));
        }
        record.access = direction(rest.trim_end().rsplit(' ').next().unwrap_or_default());
        State::emit(record, out);
        true
    }

    fn ipmmu(&self, out: &mut Vec<LogEvent>) -> bool {
        let mut record = self.record(Family::Ipmmu, IPMMU);
        record.certainty = Certainty::Likely;
        let at = if let Some(rest) = starts(self.rest, "Multiple TLB hits @") {
            record.name = "MHIT";
            record.meaning = "two cached translations match";
            record.certainty = Certainty::Unknown;
            rest
        } else if let Some(rest) = starts(self.rest, "Page Table Walk Abort @") {
            record.name = "ABORT";
            record.meaning = "a table cannot be read";
            record.class = Class::BadTable;
            rest
        } else if let Some(rest) = starts(self.rest, "Unhandled fault: status ") {
            let status = hex(rest).map_or(0, |(status, _)| status as u32);
            record.code = Some(status);
            let kinds = [(0, "TF"), (1, "PF"), (2, "ABORT"), (4, "MHIT")];
            let set = kinds.iter().filter(|(bit, _)| status >> bit & 1 == 1);
            record.flags.extend(set.map(|(_, name)| *name));
            if status & 1 == 1 {
                record.name = "TF";
                record.meaning = "not present";
                record.class = Class::NotMapped;
            } else {
                record.name = "PF";
                record.meaning = "not allowed";
                record.class = Class::Permission;
            }
            after(rest, "iova ").unwrap_or_default()
        } else {
            let errors = [(
                "TLB sync timed out",
                "an invalidation has not completed in time",
            )];
            return self.error(Family::Ipmmu, IPMMU, &errors, out);
        };
        record.address = hex(at).map(|(value, _)| Address { value, exact: true });
        State::emit(record, out);
        true
    }

    fn omap(&self, out: &mut Vec<LogEvent>) -> bool {
        let Some((_, rest)) = self.rest.around("errs:") else {
            return false;
        };
        let Some((errors, _)) = hex(rest) else {
            return false;
        };
        let mut record = self.record(Family::Omap, OMAP);
        record.code = Some(errors as u32);
        let address = hex_after(rest, " da:");
        record.address = address.map(|value| Address { value, exact: true });
        let kinds = [
            (1, "TRANSLATIONFAULT", "not present", Class::NotMapped),
            (
                3,
                "TABLEWALKFAULT",
                "a table cannot be read",
                Class::BadTable,
            ),
            (
                4,
                "MULTIHITFAULT",
                "two cached translations match",
                Class::Unknown,
            ),
            (
                2,
                "EMUMISS",
                "a debugger's access is not cached",
                Class::Unknown,
            ),
            (
                0,
                "TLBMISS",
                "nothing cached, and no walk",
                Class::NotMapped,
            ),
        ];
        let set = || kinds.iter().filter(|(bit, ..)| errors >> bit & 1 == 1);
        record.flags.extend(set().map(|(_, name, ..)| *name));
        if let Some((_, name, meaning, class)) = set().next() {
            record.name = name;
            record.meaning = meaning;
            record.class = *class;
            if *class != Class::Unknown {
                record.certainty = Certainty::Likely;
            }
        }
        let entry =
            |key: &str| after(rest, key).map(|rest| rest.strip_prefix("px").unwrap_or(rest));
        for (key, name) in [(" *pgd:", "pgd"), (" *pte:", "pte")] {
            if let Some((value, _)) = entry(key).and_then(hex) {
                record.fields.push((name, value));
            }
        }
        State::emit(record, out);
        true
    }

    fn virtio(&self, out: &mut Vec<LogEvent>) -> bool {
        let Some((reason, rest)) = self.rest.around(" fault from EP ") else {
            let errors = [(
                "invalid event buffer",
                "the device has written an event of a wrong length",
            )];
            return self.error(Family::Virtio, VIRTIO, &errors, out);
        };
        let mut record = self.record(Family::Virtio, VIRTIO);
        record.id = number(rest).map(|(id, _)| id);
        let address = hex_after(rest, " at ");
        record.address = address.map(|value| Address { value, exact: true });
        (record.name, record.meaning, record.class) = match reason.trim() {
            "domain" => (
                "VIRTIO_IOMMU_FAULT_R_DOMAIN",
                "the endpoint is in no domain",
                Class::DeviceEntry,
            ),
            "page" => (
                "VIRTIO_IOMMU_FAULT_R_MAPPING",
                "not present, or not allowed",
                Class::NoAccess,
            ),
            _ => (
                "VIRTIO_IOMMU_FAULT_R_UNKNOWN",
                "a reason that the device does not report",
                Class::Unknown,
            ),
        };
        if record.class != Class::Unknown {
            record.certainty = Certainty::Certain;
        }
        let flags = after(rest, "[").unwrap_or_default();
        record.access = match flags {
            flags if flags.starts_with("R]") => FaultAccess::Read,
            flags if flags.contains('X') => FaultAccess::Execute,
            flags if flags.contains('W') => FaultAccess::Write,
            _ => FaultAccess::Unknown,
        };
        State::emit(record, out);
        true
    }

    fn verisilicon(&self, out: &mut Vec<LogEvent>) -> bool {
        let Some(rest) = starts(self.rest, "unexpected int_status=") else {
            return false;
        };
        let mut record = self.record(Family::Verisilicon, VERISILICON);
        record.code = hex(rest).and_then(|(status, _)| small(Some(status)));
        record.meaning = "a fault whose kind and address are not printed";
        State::emit(record, out);
        true
    }

    /// Unisoc's driver prints no faults; its other errors are no faults.
    fn sprd(&self, out: &mut Vec<LogEvent>) -> bool {
        if self.rest.has("fault") {
            out.push(LogEvent::Undecoded(note(Some(Family::Sprd), self.line)));
            return true;
        }
        false
    }
}

/// The kind of an Exynos unit's fault, and the text from the address on; older kernels spell the word in another way.
fn occurred(text: &str) -> Option<(&str, &str)> {
    let found = text
        .around(" occurred at ")
        .or_else(|| text.around(" occured at "));
    found.map(|(kind, rest)| (kind.strip_suffix(" FAULT").unwrap_or(kind), rest))
}

/// `read`, `rd`, `READ`; `write`, `wr`, `WRITE`.
fn direction(text: &str) -> FaultAccess {
    let word = text.trim_start();
    let begins = |names: [&str; 3]| names.iter().any(|name| word.starts_with(name));
    if begins(["read", "rd", "READ"]) {
        FaultAccess::Read
    } else if begins(["write", "wr", "WRITE"]) {
        FaultAccess::Write
    } else {
        FaultAccess::Unknown
    }
}
