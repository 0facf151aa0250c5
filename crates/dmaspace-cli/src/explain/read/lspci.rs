//! `lspci` in its forms: `-nn`, `-nnk`, `-v` to `-vvv`, `-D`.
//!
//! Source: pciutils 3.13 `lspci.c` (`show_terse`), `ls-kernel.c`, `ls-caps.c`.

use super::super::facts::{Driver, Facts, Member};
use super::super::finding::quote;
use super::super::number::{hexadecimal, pci};

/// A listing that is being read.
#[derive(Debug, Default)]
pub(in crate::explain) struct Listing {
    /// The function whose lines follow.
    current: Option<String>,
    /// The functions so far; without a line of a driver they have none, once one of the listing has such a line.
    devices: Vec<(String, usize)>,
    drivers: bool,
}

/// Classes that stand in a listing without numbers. Source: pci.ids.
const CLASSES: [(&str, u32); 16] = [
    ("VGA compatible controller", 0x03_0000),
    ("3D controller", 0x03_0200),
    ("Display controller", 0x03_8000),
    ("PCI bridge", 0x06_0400),
    ("Host bridge", 0x06_0000),
    ("ISA bridge", 0x06_0100),
    ("CardBus bridge", 0x06_0700),
    ("Audio device", 0x04_0300),
    ("Multimedia audio controller", 0x04_0100),
    ("USB controller", 0x0c_0300),
    ("SMBus", 0x0c_0500),
    ("Serial bus controller", 0x0c_8000),
    ("Ethernet controller", 0x02_0000),
    ("Network controller", 0x02_8000),
    ("SATA controller", 0x01_0601),
    ("Non-Volatile memory controller", 0x01_0802),
];

impl Listing {
    /// Takes a line; false: it is none of lspci.
    pub(in crate::explain) fn line(
        &mut self,
        facts: &mut Facts,
        file: usize,
        at: u64,
        text: &str,
    ) -> bool {
        if text.starts_with([' ', '\t']) && self.current.is_some() {
            self.detail(facts, file, at, text.trim());
            return true;
        }
        let line = text.trim_start();
        let Some((address, rest)) = line.split_once(' ') else {
            return false;
        };
        let Some(address) = pci(address) else {
            return false;
        };
        // NAME [CLASS]: VENDOR DEVICE [VENDOR:DEVICE]
        let Some((name, device)) = rest.split_once(": ") else {
            return false;
        };
        let (name, class) = match name.rsplit_once(" [") {
            Some((name, code)) => {
                let code = code.trim_end_matches(']');
                let class = hexadecimal(code).filter(|_| code.len() == 4);
                let class = class.and_then(|class| u32::try_from(class << 8).ok());
                (name, class.map(|class| class | interface(device)))
            }
            None => {
                let known = CLASSES.iter().find(|(known, _)| *known == name);
                (name, known.map(|(_, class)| *class))
            }
        };
        if class.is_none() && !name.starts_with(|c: char| c.is_uppercase()) {
            return false;
        }
        let evidence = quote(file, at, text);
        if let Some(function) = facts.function(&address, &evidence) {
            function.class = class.or(function.class);
            function.name = name.to_owned();
            function.vendor = vendor(device).or(function.vendor);
        }
        facts.content(file, "lspci");
        self.devices.push((address.clone(), file));
        self.current = Some(address);
        true
    }

    /// The next line is no detail of the function before it.
    pub(in crate::explain) fn close(&mut self) {
        self.current = None;
    }

    fn detail(&mut self, facts: &mut Facts, file: usize, at: u64, line: &str) {
        let Some(address) = self.current.clone() else {
            return;
        };
        let evidence = quote(file, at, line);
        if let Some(group) = line.strip_prefix("IOMMU group: ") {
            if let Ok(group) = group.trim().parse() {
                let member = Member {
                    group,
                    device: address,
                };
                Facts::push(
                    &mut facts.members,
                    &mut facts.dropped,
                    "members",
                    member,
                    evidence,
                );
            }
            return;
        }
        let kernel =
            line.starts_with("Kernel driver in use:") || line.starts_with("Kernel modules:");
        self.drivers |= kernel;
        let Some(function) = facts.function(&address, &evidence) else {
            return;
        };
        if let Some(driver) = line.strip_prefix("Kernel driver in use: ") {
            function.driver = Driver::Bound(driver.trim().to_owned());
        } else if let Some(node) = line.strip_prefix("NUMA node: ") {
            function.node = node.trim().parse().ok();
        } else if line.starts_with("Region ") && line.contains("Memory at ") {
            function
                .bars
                .extend(bar(line).filter(|_| function.bars.len() < 8));
        } else if line.starts_with("Capabilities: <access denied>") {
            function.capabilities = false;
        } else if line.starts_with("Capabilities: [") {
            // Extended ones are from 0x100 on; without rights none of them is shown.
            let offset = line.split(['[', ' ', ']']).nth(2).unwrap_or_default();
            function.capabilities |= offset.len() >= 3;
            function.acs |= line.contains("Access Control Services");
        }
    }

    /// Ends the listing: functions without a driver are bound to none, if the listing has drivers at all.
    pub(in crate::explain) fn finish(self, facts: &mut Facts) {
        if !self.drivers {
            return;
        }
        for key in self.devices {
            match facts.functions.get_mut(&key) {
                Some(known) if known.fact.driver == Driver::Unknown => {
                    known.fact.driver = Driver::None;
                }
                _ => {}
            }
        }
    }
}

/// `(prog-if 30 [XHCI])`.
fn interface(text: &str) -> u32 {
    let found = text
        .split_once("(prog-if ")
        .and_then(|(_, rest)| hexadecimal(rest.get(..2)?));
    found.and_then(|code| u32::try_from(code).ok()).unwrap_or(0)
}

/// `[8086:0c01]`, the last of the line.
fn vendor(text: &str) -> Option<u16> {
    let ids = text.rmatch_indices('[').find_map(|(at, _)| {
        let (inside, _) = text.get(at + 1..)?.split_once(']')?;
        let (vendor, device) = inside.split_once(':')?;
        (vendor.len() == 4 && device.len() == 4).then_some(vendor)
    });
    match ids {
        Some(vendor) => u16::try_from(hexadecimal(vendor)?).ok(),
        None if text.starts_with("Intel Corporation") => Some(0x8086),
        None if text.starts_with("Advanced Micro Devices") => Some(0x1022),
        None => None,
    }
}

/// `Region 0: Memory at 20000000000 (64-bit, prefetchable) [size=128G]`.
fn bar(line: &str) -> Option<(Option<u64>, u64)> {
    let (_, rest) = line.split_once("Memory at ")?;
    let address = rest.split(' ').next().and_then(hexadecimal);
    let (_, size) = line.split_once("[size=")?;
    let size = size.split(']').next()?;
    let unit = match size.chars().last()? {
        'K' => 1 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        'T' => 1u64 << 40,
        _ => 1,
    };
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    Some((address, digits.parse::<u64>().ok()?.checked_mul(unit)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_class_driver_and_bars() {
        let text = "00:01.0 PCI bridge [0604]: Intel Corporation Device [8086:0c01] (rev 06)\n\
            \tKernel driver in use: pcieport\n\
            01:00.0 3D controller: NVIDIA Corporation Device (rev a1)\n\
            \tRegion 1: Memory at 20000000000 (64-bit, prefetchable) [size=128G]\n\
            \tCapabilities: [100 v1] Advanced Error Reporting\n";
        let (mut facts, mut listing) = (Facts::default(), Listing::default());
        for (at, line) in (1..).zip(text.lines()) {
            assert!(listing.line(&mut facts, 0, at, line), "{line}");
        }
        listing.finish(&mut facts);
        let bridge = &facts.known("0000:00:01.0", None).unwrap().fact;
        assert!(bridge.is_bridge() && bridge.vendor == Some(0x8086));
        let gpu = &facts.known("0000:01:00.0", None).unwrap().fact;
        assert!(gpu.is_display() && gpu.capabilities && !gpu.acs);
        assert_eq!(gpu.driver, Driver::None);
        assert_eq!(gpu.bars, [(Some(0x200_0000_0000), 128 << 30)]);
    }

    #[test]
    fn lines_of_logs_are_no_functions() {
        let (mut facts, mut listing) = (Facts::default(), Listing::default());
        for line in [
            "0000:01:00.0: AMD-Vi: x",
            "01:00.0 is not: x",
            "usb 1-1: x",
            "\tx",
        ] {
            assert!(!listing.line(&mut facts, 0, 1, line), "{line}");
        }
    }
}
