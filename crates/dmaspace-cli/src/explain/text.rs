//! The report for people: the finding first, then what it follows from, then what to do.

use super::finding::{Advice, Finding, Report, plain};
use crate::draw::sheet::{Paint, Sheet};

/// Lines of evidence that are quoted; the rest is counted.
const MOST_QUOTED: usize = 6;

pub(super) fn report(report: &Report, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    for (nth, finding) in report.findings.iter().enumerate() {
        sheet.gap();
        one(&mut sheet, report, nth + 1, finding);
    }
    if report.findings.is_empty() {
        sheet.line("Nothing in the input shows a cause.");
    }
    if !report.contents.is_empty() || !report.notes.is_empty() {
        sheet.section("Input");
    }
    for (file, contents) in &report.contents {
        let name = report.files.get(*file).map_or("?", String::as_str);
        let contents: Vec<&str> = contents.iter().copied().collect();
        sheet.line(&format!("  {}: {}", plain(name), contents.join(", ")));
    }
    for note in &report.notes {
        sheet.line(&format!("  {}", plain(note)));
    }
    sheet.into_text()
}

fn one(sheet: &mut Sheet, report: &Report, number: usize, finding: &Finding) {
    let paint = sheet.paint();
    let head = format!("{number}. {} ({})", finding.cause, finding.certainty.name());
    sheet.line(&format!("{} {}", paint.bold(&head), plain(&finding.text)));
    // One line for each place; lines that follow one another once.
    let with_text = finding.evidence.iter().filter(|one| !one.quote.is_empty());
    let shown: Vec<_> = with_text.take(MOST_QUOTED).collect();
    for evidence in &shown {
        let place = plain(&report.place(&evidence.place));
        for line in quotation(&format!("{place}: {}", evidence.quote), sheet.columns()) {
            sheet.copied(&line);
        }
    }
    if finding.evidence.len() > shown.len() {
        let rest = finding.evidence.len() - shown.len();
        sheet.line(&format!("   | and {rest} more"));
    }
    for advice in &finding.advice {
        match advice {
            Advice::Text(text) => sheet.line(&format!("   - {}", plain(text))),
            // A pasted command is one line, however long it is.
            command => sheet.copied(&format!("     {}", command.line())),
        }
    }
    sheet.line(&format!("   Source: {}", finding.source));
}

/// A quotation in marked lines; what does not fit a few of them is cut, with a mark.
fn quotation(text: &str, columns: usize) -> Vec<String> {
    const FIRST: &str = "   | ";
    const FURTHER: &str = "   |     ";
    const MOST_LINES: usize = 4;
    let (mut lines, mut rest) = (Vec::new(), text);
    loop {
        let prefix = if lines.is_empty() { FIRST } else { FURTHER };
        let room = columns.saturating_sub(prefix.len()).max(8);
        let Some((end, _)) = rest.char_indices().nth(room) else {
            lines.push(format!("{prefix}{rest}"));
            return lines;
        };
        let head = rest.get(..end).unwrap_or_default();
        if lines.len() + 1 == MOST_LINES {
            lines.push(cut(&format!("{prefix}{rest}"), columns));
            return lines;
        }
        // A word that no line holds is broken.
        let at = head.rfind(' ').filter(|at| *at > 0).unwrap_or(end);
        let (head, tail) = rest.split_at(at);
        lines.push(format!("{prefix}{}", head.trim_end()));
        rest = tail.trim_start();
    }
}

/// The text in so many columns, with a mark where it was cut.
fn cut(text: &str, columns: usize) -> String {
    let kept: String = text.chars().take(columns.saturating_sub(4)).collect();
    format!("{} ...", kept.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::of_bytes;

    /// The commands of a finding with this advice, as printed.
    fn printed(advice: Advice) -> Vec<String> {
        let finding = Finding::certain("group.not-viable", "").advise(advice);
        let report = Report {
            findings: vec![finding],
            ..Report::default()
        };
        let text = super::report(&report, Paint::PLAIN);
        let lines = text.lines().filter_map(|line| line.strip_prefix("     "));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn commands_are_the_words_that_were_meant_on_one_line() {
        let words = |list: &[&str]| {
            list.iter()
                .map(|word| (*word).to_owned())
                .collect::<Vec<_>>()
        };
        let long = "x".repeat(120);
        for list in [
            words(&["driverctl", "set-override", "0000:01:00.1", "vfio-pci"]),
            words(&["a b", "$(reboot)", "it's", "`x`", "\"", "", "\\", ";", "*"]),
            words(&["cat", &long, "and", &long, "more"]),
            (0..60).map(|nth| format!("word{nth}")).collect(),
        ] {
            let lines = printed(Advice::Command(list.clone()));
            let [line] = lines.as_slice() else {
                panic!("{lines:?}")
            };
            assert_eq!(shlex::split(line).unwrap(), list, "{line}");
        }
    }

    #[test]
    fn a_command_for_several_is_a_loop_that_a_shell_runs() {
        let devices: Vec<String> = (0..8).map(|nth| format!("0000:03:00.{nth}")).collect();
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let hostile = ["a b", "$(reboot)", "x;reboot", "it's"];
        for list in [&devices[..], &hostile] {
            let lines = printed(Advice::each(list, ["echo", Advice::EACH]));
            let [line] = lines.as_slice() else {
                panic!("{lines:?}")
            };
            let output = std::process::Command::new("sh").args(["-c", line]).output();
            let output = String::from_utf8(output.unwrap().stdout).unwrap();
            assert_eq!(output.lines().collect::<Vec<_>>(), list, "{line}");
        }
        let one = Advice::each(&["0000:03:00.0"], ["echo", Advice::EACH]);
        assert_eq!(printed(one), ["echo 0000:03:00.0"]);
    }

    #[test]
    fn control_characters_of_the_input_are_not_printed() {
        let text = b"qemu-system-x86_64: \x1b]0;x\x07\xe2\x80\xae\x1b[31mVFIO_MAP_DMA failed: Cannot allocate memory\n";
        let report = of_bytes("a\x1b[31mb.txt", text, &mut |_, _| {});
        let printed = super::report(&report, Paint::PLAIN);
        assert!(printed.contains("VFIO_MAP_DMA"), "{printed}");
        assert!(
            printed.chars().all(|c| c == '\n' || !c.is_control()),
            "{printed:?}"
        );
        assert!(!printed.contains('\u{202e}'));
    }

    #[test]
    fn every_line_fits_80_columns() {
        let text = "[  10.5] DMAR: [DMA Write] Request device [00:12.0] fault addr 0 [fault reason 05] PTE Write access is not set\n\
            1 0000:01:00.0 030000 10de:1187 vfio-pci\n1 0000:01:00.1 040300 10de:0e0a snd_hda_intel\n\
            root=/dev/sda1 iommu=pt iommu.passthrough=0\nunknown words of nobody\n";
        let report = of_bytes("input.txt", text.as_bytes(), &mut |_, _| {});
        assert!(report.findings.len() >= 4);
        let printed = super::report(&report, Paint::PLAIN);
        // Only a command, which is pasted, is never broken.
        for line in printed.lines().filter(|line| !line.starts_with("     ")) {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(printed.contains("input.txt"), "{printed}");
    }
}
