//! QEMU's program: its version, and what its units are called and can be told there.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context as _, ensure};

/// The program that is installed.
#[derive(Clone, Debug)]
pub struct Qemu {
    program: String,
    version: String,
    units: Vec<(Unit, BTreeSet<String>)>,
}

/// An IOMMU that QEMU emulates, in one of its ways of working.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// VT-d in legacy mode: root and context tables, second stage of 3 and 4 levels.
    VtdLegacy,
    /// VT-d in scalable mode: PASID tables, second stage of 3 and 4 levels.
    VtdSecond,
    /// VT-d in scalable mode: PASID tables, first stage of 4 levels. QEMU has it from 9.2 on.
    VtdFirst,
}

impl Unit {
    const ALL: [Self; 3] = [Self::VtdLegacy, Self::VtdSecond, Self::VtdFirst];

    /// Its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VtdLegacy => "vtd-legacy",
            Self::VtdSecond => "vtd-second",
            Self::VtdFirst => "vtd-first",
        }
    }

    /// QEMU's name of the device.
    const fn device(self) -> &'static str {
        match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => "intel-iommu",
        }
    }

    /// What it is told: of each row the first option that QEMU has, since options were renamed when
    /// they were no experiments any more.
    const fn options(self) -> &'static [&'static [&'static str]] {
        const BITS: &[&str] = &["aw-bits=48"];
        const SNOOP: &[&str] = &["snoop-control=on"];
        const SCALABLE: &[&str] = &["scalable-mode=on", "x-scalable-mode=on"];
        const FIRST: &[&str] = &["fsts=on", "x-flts=on"];
        match self {
            Self::VtdLegacy => &[BITS, SNOOP],
            Self::VtdSecond => &[BITS, SNOOP, SCALABLE],
            Self::VtdFirst => &[BITS, SNOOP, SCALABLE, FIRST],
        }
    }
}

impl Qemu {
    /// The program of this name, asked for its version and for what its units can be told.
    pub fn find(program: &str) -> anyhow::Result<Self> {
        let version = ask(program, &["--version"])?;
        let version = version.lines().next().unwrap_or_default().to_owned();
        let options = |unit: Unit| {
            let help = ask(program, &["-device", &format!("{},help", unit.device())])?;
            anyhow::Ok((unit, names(&help)))
        };
        Ok(Self {
            program: program.to_owned(),
            version,
            units: Unit::ALL
                .into_iter()
                .map(options)
                .collect::<Result<_, _>>()?,
        })
    }

    /// What it says of its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// A command that starts it, without arguments.
    pub(crate) fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// The argument of `-device` for a unit; `None` when QEMU does not have all that belongs to it.
    pub(crate) fn unit(&self, unit: Unit) -> Option<String> {
        let (_, known) = self.units.iter().find(|(of, _)| *of == unit)?;
        let mut argument = unit.device().to_owned();
        for row in unit.options() {
            let name = |option: &str| option.split('=').next().map(ToOwned::to_owned);
            let known = |option: &&&str| name(option).is_some_and(|name| known.contains(&name));
            let option = row.iter().find(known)?;
            argument = format!("{argument},{option}");
        }
        Some(argument)
    }

    /// True when it can emulate the unit.
    pub fn offers(&self, unit: Unit) -> bool {
        self.unit(unit).is_some()
    }
}

fn ask(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("{program} cannot be started"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The options in a help text: `name=<type>` at the beginning of a line.
fn names(help: &str) -> BTreeSet<String> {
    help.lines()
        .filter_map(|line| line.trim_start().split_once("=<"))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu(help: &str) -> Qemu {
        Qemu {
            program: "none".into(),
            version: "none".into(),
            units: Unit::ALL.map(|unit| (unit, names(help))).into(),
        }
    }

    #[test]
    fn options_have_the_names_that_qemu_gives_them() {
        let old = qemu(
            "intel-iommu options:\n  aw-bits=<uint8>        -  (default: 39)\n  \
             snoop-control=<bool>   -  (default: false)\n  x-scalable-mode=<bool> - \n",
        );
        let argument = |qemu: &Qemu, unit| qemu.unit(unit).unwrap_or_default();
        let base = "intel-iommu,aw-bits=48,snoop-control=on";
        assert_eq!(argument(&old, Unit::VtdLegacy), base);
        let scalable = format!("{base},x-scalable-mode=on");
        assert_eq!(argument(&old, Unit::VtdSecond), scalable);
        assert!(!old.offers(Unit::VtdFirst));
        let new =
            qemu("  fsts=<bool>\n aw-bits=<uint8>\n snoop-control=<bool>\n scalable-mode=<bool>");
        let first = format!("{base},scalable-mode=on,fsts=on");
        assert_eq!(argument(&new, Unit::VtdFirst), first);
    }
}
