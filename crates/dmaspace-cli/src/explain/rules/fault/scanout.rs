//! Reads of a display engine that goes on with its picture.

use iommu::log::{Class, Family};

use super::{ALLOCATOR, of_addresses};
use crate::explain::facts::{Facts, Line};
use crate::explain::finding::{Advice, Direction, Evidence, Finding};
use crate::explain::folds::Fold;

/// Seconds of a boot in which firmware's pictures are still shown.
const BOOT_SECONDS: f64 = 20.0;

/// Pictures a second of displays.
const FRAME_RATES: std::ops::RangeInclusive<f64> = 23.0..=245.0;

/// The time between two faults at one address, where it is that of a display's pictures.
pub(super) fn period(fold: &Fold) -> Option<f64> {
    let times = fold.times.iter();
    let mut steps: Vec<f64> = times
        .clone()
        .zip(times.skip(1))
        .filter(|((_, a), (_, b))| a == b)
        .map(|((first, _), (second, _))| second - first)
        .filter(|step| *step > 0.0 && *step < 0.1)
        .collect();
    steps.sort_by(f64::total_cmp);
    let (least, most) = (steps.first()?, steps.last()?);
    let regular = steps.len() >= 2 && most - least < 0.15 * most;
    (regular && FRAME_RATES.contains(&(1.0 / most))).then_some(*most)
}

/// VT-d: 00:02.0 is the place of Intel's graphics.
fn is_intels(fold: &Fold) -> bool {
    fold.key.family == Family::Vtd && fold.device == "0000:00:02.0"
}

pub(super) fn is_display(facts: &Facts, fold: &Fold) -> bool {
    facts
        .is_display(&fold.device)
        .unwrap_or_else(|| is_intels(fold))
}

/// Reads of one device, of a kind that a display engine makes.
struct Reads<'f> {
    device: &'f str,
    folds: Vec<&'f Fold>,
    addresses: Vec<u64>,
    /// All of them in the first seconds of the boot.
    at_boot: bool,
    /// The time between two reads of one address, where it is that of a display's pictures.
    rate: Option<f64>,
    /// Several pages that lie side by side.
    near: bool,
}

impl<'f> Reads<'f> {
    /// The reads of a device in one file; `None` if there is none with a time.
    fn of(facts: &'f Facts, file: usize, device: &'f str) -> Option<Self> {
        let all = facts.folds.folds.iter();
        let folds: Vec<&Fold> = all
            .filter(|fold| {
                fold.file == file && fold.device == device && fold.key.direction == Direction::Read
            })
            .filter(|fold| {
                matches!(
                    fold.key.class,
                    Class::NoAccess | Class::NotMapped | Class::BadTable
                ) && fold.addresses.iter().any(|address| *address >= 0x1000)
            })
            .collect();
        let addresses: Vec<u64> = folds
            .iter()
            .flat_map(|fold| fold.addresses.iter().copied())
            .collect();
        let mut times = folds
            .iter()
            .flat_map(|fold| fold.times.iter().map(|(time, _)| *time))
            .peekable();
        times.peek()?;
        let since_boot = folds.iter().all(|fold| fold.since_boot);
        let at_boot = since_boot && times.all(|time| time < BOOT_SECONDS);
        let mut pages: Vec<u64> = addresses.iter().map(|address| address >> 12).collect();
        pages.sort_unstable();
        pages.dedup();
        let near = pages
            .first()
            .zip(pages.last())
            .is_some_and(|(first, last)| pages.len() > 1 && last - first < 1 << 14);
        Some(Self {
            device,
            rate: folds.iter().find_map(|fold| period(fold)),
            folds,
            addresses,
            at_boot,
            near,
        })
    }

    fn evidence(&self) -> impl Iterator<Item = &'f Evidence> {
        self.folds.iter().flat_map(|fold| &fold.evidence)
    }

    /// True where a display is known by its class or place, and reads as one that was left on.
    fn of_display(&self, facts: &Facts) -> bool {
        let display = self
            .folds
            .first()
            .is_some_and(|first| is_display(facts, first));
        // Buffers of a host's driver are no picture that was left over.
        let buffers = self
            .addresses
            .iter()
            .all(|address| ALLOCATOR.contains(address));
        display
            && (self.rate.is_some() || !buffers)
            && (self.at_boot || self.rate.is_some() || self.near)
    }

    /// The finding of a known display.
    fn display(&self) -> Finding {
        let device = self.device;
        let (when, mut advice) = match (self.at_boot, self.rate) {
            (true, _) => (
                "within the first seconds of the boot".to_owned(),
                vec![
                    "Firmware must report the framebuffer as a reserved region (RMRR, IVMD), or stop the display \
                     engine: a firmware update.",
                    "intel_iommu=igfx_off as a test: the graphics device alone is then not translated.",
                ],
            ),
            (_, Some(rate)) => (
                format!(
                    "at the same place every {:.2} ms, as a display does with its pictures",
                    rate * 1e3
                ),
                vec![
                    "The guest's driver or firmware must stop the display engine before a reset, and the monitor must \
                     reset the function or keep it in a blocking domain.",
                    "To prove it on the host: clear bus mastering in the command register, and the faults stop.",
                ],
            ),
            _ => (
                "in neighbouring pages".to_owned(),
                vec![
                    "Map or emulate the memory that the display engine reads: stolen memory, the OpRegion (x-igd-gms).",
                ],
            ),
        };
        // The option is of Intel's driver.
        let intels = self.folds.first().is_some_and(|first| is_intels(first));
        if self.at_boot && !intels {
            advice.truncate(1);
        }
        let mut finding = Finding::likely("fault.scanout", "Linux drivers/iommu/intel/iommu.c, quirks of graphics devices (igfx_off); VT-d 5.0, section 8.4 \"RMRR\"")
            .device(device)
            .evidence(self.evidence())
            .say(format!(
                "{device} is a display controller and reads {when}: likely an engine that was started earlier, by \
                 firmware, a boot loader or a guest, goes on reading its framebuffer."
            ));
        finding.access = Direction::Read;
        let advice = advice.into_iter().map(Advice::text);
        of_addresses(advice.fold(finding, Finding::advise), &self.addresses)
    }
}

/// The finding of an engine whose mappings of the boot the kernel announced.
fn announced_at_boot(announced: &[&Evidence]) -> Finding {
    let mut finding = Finding::likely("fault.scanout", "Linux drivers/iommu/arm/arm-smmu/arm-smmu-qcom.c, qcom_smmu_cfg_probe; Devicetree, reserved-memory, iommu-addresses")
        .evidence(announced.iter().copied())
        .say(
            "Pages are read one after the other in the first second of the boot, after the driver took over the boot \
             loader's mappings: likely a display engine that the boot loader has started goes on reading its picture."
                .to_owned(),
        )
        .advise(Advice::text(
            "Reserve the framebuffer in the device tree: a reserved-memory node with iommu-addresses, and \
             memory-region in the display's node.",
        ));
    finding.access = Direction::Read;
    finding
}

/// Reads of a display engine that firmware, a boot loader or a guest has started.
pub(super) fn scanout(facts: &Facts, found: &mut Vec<Finding>) {
    let folds = facts.folds.folds.iter();
    let mut devices: Vec<(usize, &str)> = folds
        .map(|fold| (fold.file, fold.device.as_str()))
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let mut boot: Option<Finding> = None;
    for (file, device) in devices {
        let Some(reads) = Reads::of(facts, file, device) else {
            continue;
        };
        let announced: Vec<&Evidence> = facts
            .lines
            .iter()
            .filter(|one| matches!(one.fact, Line::BootMappings { .. }))
            .map(|one| &one.evidence)
            .filter(|evidence| evidence.place.file == file)
            .collect();
        let smmu = |fold: &&Fold| fold.key.family == Family::SmmuV2;
        if reads.of_display(facts) {
            found.push(reads.display());
        } else if !announced.is_empty() && reads.at_boot && reads.folds.first().is_some_and(smmu) {
            // One engine may have several numbers.
            let finding = boot.take().unwrap_or_else(|| announced_at_boot(&announced));
            boot = Some(of_addresses(
                finding.device(device).evidence(reads.evidence()),
                &reads.addresses,
            ));
        }
    }
    found.extend(boot);
}
