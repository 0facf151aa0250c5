use super::*;

fn line(colour: &'static str, points: &[(f64, f64)]) -> Line {
    Line {
        name: "dmaspace".into(),
        colour,
        dashed: colour == "old",
        points: points.into(),
    }
}

fn plot(lines: Vec<Line>) -> Plot {
    let axis = || Axis {
        title: "a < b".into(),
        step: 10.0,
        show: |value| format!("{value}"),
    };
    Plot {
        title: "R&D".into(),
        x: axis(),
        y: axis(),
        lines,
    }
}

#[test]
fn an_axis_reaches_from_power_to_power() {
    let axis = Scale::around(10.0, [0.3, 40.0, f64::NAN, 0.0].into_iter()).unwrap();
    assert_eq!((axis.low, axis.high), (-1.0, 2.0));
    assert!(axis.place(0.1) < 1e-12 && axis.place(100.0) == 1.0);
    assert!((axis.place(1.0) - 1.0 / 3.0).abs() < 1e-12);
    assert_eq!(axis.parts().collect::<Vec<_>>(), [0.1, 1.0, 10.0, 100.0]);
    let sizes = Scale::around(2.0, (12..=22).map(|log| f64::from(1 << log))).unwrap();
    assert_eq!((sizes.low, sizes.high), (12.0, 22.0));
    assert_eq!(sizes.parts().count(), 6);
    let wide = Scale::around(2.0, [1.0, 2f64.powi(30)].into_iter()).unwrap();
    assert!(wide.parts().count() <= 9);
    assert_eq!(Scale::around(2.0, [0.0, f64::NAN].into_iter()), None);
    // One value has an axis, too.
    let one = Scale::around(10.0, std::iter::once(10.0)).unwrap();
    assert!(one.high > one.low && one.place(10.0).is_finite());
}

#[test]
fn lines_and_words_are_in_their_places() {
    let points = [(1.0, 10.0), (2.0, 0.0), (10.0, 1000.0)];
    let plot = plot(vec![line("old", &points)]);
    let svg = plot.svg().unwrap();
    let curve = "<path class=\"curve old dashed\" d=\"M56.0 230.0L448.0 46.0\"/>";
    assert!(svg.contains(curve), "{svg}");
    assert!(svg.contains("d=\"M56.0 230.0h0M448.0 46.0h0\""), "{svg}");
    assert!(svg.contains("R&amp;D") && svg.contains("a &lt; b"));
}

#[test]
fn nothing_to_draw_is_no_plot() {
    assert_eq!(plot(Vec::new()).svg(), None);
    assert_eq!(plot(vec![line("c0", &[(0.0, 1.0)])]).svg(), None);
}

#[test]
fn long_names_have_rows_of_their_own_in_the_legend() {
    let of = |name: &str| {
        let named = |colour| Line {
            name: name.into(),
            ..line(colour, &[(1.0, 10.0)])
        };
        let svg = plot(vec![named("c0"), named("c1")]).svg().unwrap();
        let second = svg.split("<rect class=\"bar c1\" x=\"").nth(1).unwrap();
        second.split('"').next().unwrap().to_owned()
    };
    assert_eq!(of(&"a".repeat(28)), "236");
    assert_eq!(of(&"a".repeat(29)), "16");
}

#[test]
fn colours_are_those_of_the_style() {
    for colour in COLOURS {
        assert!(
            STYLE.contains(&format!(".{colour}{{--of:var(--{colour})}}")),
            "{colour}"
        );
        assert!(STYLE.contains(&format!("--{colour}:#")), "{colour}");
    }
}
