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
    /// VT-d in scalable mode: PASID tables, second stage and, where QEMU has it, first stage.
    VtdScalable,
}

impl Unit {
    const ALL: [Self; 2] = [Self::VtdLegacy, Self::VtdScalable];

    /// QEMU's name of the device.
    const fn device(self) -> &'static str {
        match self {
            Self::VtdLegacy | Self::VtdScalable => "intel-iommu",
        }
    }

    /// Options in the order of preference: of each row the first that QEMU has. A row may be missing
    /// where QEMU has none of it.
    const fn options(self) -> &'static [&'static [&'static str]] {
        const BITS: &[&str] = &["aw-bits=48"];
        const SNOOP: &[&str] = &["snoop-control=on"];
        match self {
            Self::VtdLegacy => &[BITS, SNOOP],
            Self::VtdScalable => &[
                BITS,
                SNOOP,
                // Both were renamed when they were no experiments any more.
                &["scalable-mode=on", "x-scalable-mode=on"],
                &["fsts=on", "x-flts=on"],
            ],
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

    /// The argument of `-device` for a unit.
    pub(crate) fn unit(&self, unit: Unit) -> String {
        let known = self.units.iter().find(|(of, _)| *of == unit);
        let known = |option: &str| {
            let name = option.split('=').next().unwrap_or_default();
            known.is_some_and(|(_, names)| names.contains(name))
        };
        let mut argument = unit.device().to_owned();
        for row in unit.options() {
            if let Some(option) = row.iter().find(|option| known(option)) {
                argument = format!("{argument},{option}");
            }
        }
        argument
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
        assert_eq!(
            old.unit(Unit::VtdLegacy),
            "intel-iommu,aw-bits=48,snoop-control=on"
        );
        assert_eq!(
            old.unit(Unit::VtdScalable),
            "intel-iommu,aw-bits=48,snoop-control=on,x-scalable-mode=on"
        );
        let new = qemu("  fsts=<bool>\n  aw-bits=<uint8>\n  scalable-mode=<bool>\n");
        assert_eq!(
            new.unit(Unit::VtdScalable),
            "intel-iommu,aw-bits=48,scalable-mode=on,fsts=on"
        );
    }
}
