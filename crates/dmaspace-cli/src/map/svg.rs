//! A map as a picture: its address space, coloured by the size of the leaves. Without tables of our own there
//! is nothing to draw.

use super::MapReport;
use crate::draw::svg::{counted_leaves, picture};
use crate::size::{bytes, counted};

/// The picture of a map as SVG 1.1.
pub(crate) fn draw(report: &MapReport) -> String {
    let (title, subtitle) = titles(report);
    picture(
        &title,
        &subtitle,
        report.layout.as_deref().unwrap_or_default(),
        |_| String::new(),
    )
}

fn titles(report: &MapReport) -> (String, String) {
    let memory = &report.memory;
    let tables = report.tables.clone().unwrap_or_default();
    let found = memory.found.clone().unwrap_or_default();
    let leaves = tables.leaves.iter().map(|class| class.count);
    let title = format!(
        "{} in {} tables: {}, {}",
        bytes(memory.size_bytes),
        tables.format,
        counted(found.runs, "run"),
        counted_leaves(leaves.fold(0, u64::saturating_add)),
    );
    let real = if found.addresses == "pagemap" {
        "real"
    } else {
        "not real"
    };
    let subtitle = format!(
        "{} memory, {}, physical addresses {real} ({})",
        memory.backing,
        counted(tables.table_pages, "table page"),
        found.addresses,
    );
    (title, subtitle)
}

#[cfg(test)]
mod tests {
    use super::super::{Stretch, samples};
    use super::*;
    use crate::draw::svg::STRIP;

    #[test]
    fn two_sizes_of_leaves() {
        let svg = draw(&samples::synthetic());
        let svg = svg.replace(lab::plot::STYLE, "STYLE\n");
        assert_eq!(svg, SYNTHETIC.trim_start_matches('\n'), "\n{svg}");
    }

    #[test]
    fn no_stretch_is_too_narrow_to_be_seen() {
        let mut report = samples::huge();
        report.layout.as_mut().unwrap().push(Stretch {
            iova: 0x1_0000_0000 + (256 << 20),
            len_bytes: 4096,
            leaf_bytes: 4096,
        });
        let svg = draw(&report);
        assert!(
            svg.contains("<rect class=\"s12\" x=\"935.25\" y=\"68.00\" width=\"0.75\""),
            "{svg}"
        );
    }

    #[test]
    fn thousands_of_stretches_are_drawn_as_columns() {
        let few = draw(&samples::striped(100));
        assert_eq!(few.matches("<title>").count(), 101);
        let many = draw(&samples::striped(100_000));
        assert!(many.len() < 120_000, "{} bytes", many.len());
        assert!(many.contains("50,000 × ") || many.contains("GiB"), "legend");
        let drawn = many.matches("width=\"1.00\"").count();
        assert_eq!(drawn, STRIP as usize);
    }

    #[test]
    fn odd_reports_are_drawn_all_the_same() {
        draw(&MapReport::default());
        let mut report = samples::huge();
        report.tables.as_mut().unwrap().format = "<&>".into();
        report.layout = Some(vec![
            Stretch {
                iova: u64::MAX - 4095,
                len_bytes: u64::MAX,
                leaf_bytes: 0,
            },
            Stretch {
                iova: 0,
                len_bytes: 0,
                leaf_bytes: u64::MAX,
            },
        ]);
        let svg = draw(&report);
        assert!(svg.contains("&lt;&amp;&gt;"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    const SYNTHETIC: &str = r#"
<svg xmlns="http://www.w3.org/2000/svg" width="960" height="216" viewBox="0 0 960 216" role="img">
<title>8 MiB in amdv1 tables: 190 runs, 1,088 leaves</title>
<style>
STYLE
.s12{fill:#dc464b}
.s16{fill:#907b00}
</style>
<rect class="paper" width="960" height="216"/>
<text class="head" x="24" y="30">8 MiB in amdv1 tables: 190 runs, 1,088 leaves</text>
<text class="faint" x="24" y="50">4k memory, 1 table page, physical addresses not real (synthetic)</text>
<rect class="empty" x="24.00" y="68.00" width="912.00" height="56.00"/>
<rect class="s12" x="24.00" y="68.00" width="456.00" height="56.00"><title>0x100000 to 0x500000: 1,024 leaves of 4 KiB</title></rect>
<rect class="s16" x="480.00" y="68.00" width="456.00" height="56.00"><title>0x500000 to 0x900000: 64 leaves of 64 KiB</title></rect>
<line class="tick" x1="24" y1="124" x2="24" y2="130"/>
<text class="faint" x="24" y="146" text-anchor="start" font-family="monospace">0x100000</text>
<line class="tick" x1="252" y1="124" x2="252" y2="130"/>
<text class="faint" x="252" y="146" text-anchor="middle" font-family="monospace">0x300000</text>
<line class="tick" x1="480" y1="124" x2="480" y2="130"/>
<text class="faint" x="480" y="146" text-anchor="middle" font-family="monospace">0x500000</text>
<line class="tick" x1="708" y1="124" x2="708" y2="130"/>
<text class="faint" x="708" y="146" text-anchor="middle" font-family="monospace">0x700000</text>
<line class="tick" x1="936" y1="124" x2="936" y2="130"/>
<text class="faint" x="936" y="146" text-anchor="end" font-family="monospace">0x900000</text>
<rect class="s12" x="24" y="180" width="14" height="14" rx="2"/>
<text class="ink" x="46" y="192">1,024 × 4 KiB = 4 MiB</text>
<rect class="s16" x="252" y="180" width="14" height="14" rx="2"/>
<text class="ink" x="274" y="192">64 × 64 KiB = 4 MiB</text>
</svg>
"#;
}
