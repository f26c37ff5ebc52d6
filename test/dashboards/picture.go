package dashboards

import (
	"context"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/samber/lo"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

const (
	columns = 24
	// column and line are the sizes of a cell of Grafana's grid, in points.
	column vg.Length = 44
	line   vg.Length = 21
	margin vg.Length = 8
	// dots is the resolution of the picture, per inch.
	dots = 90
	// names is the number of series that a plot's legend names, and a table shows.
	names = 6
	// sans is the variant of the font.
	sans = "Sans"
)

var (
	ink   = color.Gray{Y: 40}
	faint = color.Gray{Y: 215}
	mild  = color.Gray{Y: 120}
	// hues are Okabe and Ito's colours, which people with any colour vision can tell apart. They are at
	// least as many as a legend names.
	hues = [...]color.RGBA{
		{R: 213, G: 94, A: 255},
		{G: 114, B: 178, A: 255},
		{G: 158, B: 115, A: 255},
		{R: 204, G: 121, B: 167, A: 255},
		{R: 230, G: 159, A: 255},
		{R: 86, G: 180, B: 233, A: 255},
		{A: 255},
	}
)

// Draw plots a dashboard during the recording as PNG. It returns the titles of the panels without a
// value, and of those of counters with no other value than zero: nothing of what they show happened.
func (r *Recording) Draw(ctx context.Context, d Dashboard, out io.Writer) (empty, zero []string, err error) {
	rows := lo.Max(lo.Map(d.Panels, func(p Panel, _ int) int { return p.GridPos.Y + p.GridPos.H }))
	width, height := columns*column+2*margin, vg.Length(rows+1)*line+3*margin
	canvas := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(dots), vgimg.UseBackgroundColor(color.White))
	whole := draw.New(canvas)
	write(whole, d.Title, 13, ink, vg.Point{X: margin, Y: height - margin - line*.8})
	for _, p := range d.Panels {
		left, top := margin+vg.Length(p.GridPos.X)*column, height-2*margin-line-vg.Length(p.GridPos.Y)*line
		area := draw.Canvas{Canvas: canvas, Rectangle: vg.Rectangle{
			Min: vg.Point{X: left, Y: top - vg.Length(p.GridPos.H)*line}, Max: vg.Point{X: left + vg.Length(p.GridPos.W)*column, Y: top},
		}}
		if p.Type == "row" {
			write(area, p.Title, 11, ink, vg.Point{X: area.Min.X, Y: area.Min.Y + 5})
			continue
		}
		shown, err := r.panel(ctx, p, area)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("%s: the panel %q: %w", d.Name, p.Title, err)
		case len(shown) == 0:
			empty = append(empty, p.Title)
		case p.counts() && lo.EveryBy(shown, func(s named) bool { return peak(s) == 0 }):
			zero = append(zero, p.Title)
		}
	}
	_, err = vgimg.PngCanvas{Canvas: canvas}.WriteTo(out)
	return empty, zero, err
}

// panel draws one panel. It returns the series that have a value.
func (r *Recording) panel(ctx context.Context, p Panel, area draw.Canvas) ([]named, error) {
	frame := draw.Crop(area, 3, -3, 3, -3)
	frame.StrokeLines(draw.LineStyle{Color: faint, Width: .7}, []vg.Point{
		frame.Min, {X: frame.Max.X, Y: frame.Min.Y}, frame.Max, {X: frame.Min.X, Y: frame.Max.Y}, frame.Min,
	})
	write(frame, p.Title, 9, ink, vg.Point{X: frame.Min.X + 6, Y: frame.Max.Y - 13})
	var all []named
	for _, target := range p.Targets {
		matrix, err := r.during(ctx, target.Expr)
		if err != nil {
			return nil, err
		}
		for _, series := range matrix {
			name := target.legend(series.Metric.Get)
			if p.Type == "table" { // it has a column for each label
				name = strings.Join(labelValues(series.Metric), "/")
			}
			all = append(all, named{name, series.Floats})
		}
	}
	all = lo.Filter(all, func(s named, _ int) bool {
		return slices.ContainsFunc(s.values, func(v promql.FPoint) bool { return !math.IsNaN(v.F) && !math.IsInf(v.F, 0) })
	})
	inside := draw.Crop(frame, 6, -6, 6, -18)
	switch {
	case len(all) == 0:
		write(inside, "no data", 9, mild, vg.Point{X: inside.Min.X, Y: (inside.Min.Y + inside.Max.Y) / 2})
	case p.Type == "stat":
		write(inside, format(all[0].last(), p.unit()), 20, ink, vg.Point{X: inside.Min.X, Y: inside.Min.Y + 8})
	case p.Type == "table":
		for i, s := range lo.Slice(all, 0, names) {
			write(inside, s.name+"   "+format(s.last(), p.unit()), 9, ink, vg.Point{X: inside.Min.X, Y: inside.Max.Y - vg.Length(i+1)*15})
		}
	default:
		return all, r.lines(p, all, inside)
	}
	return all, nil
}

func labelValues(of labels.Labels) (values []string) {
	of.Range(func(l labels.Label) { values = append(values, l.Value) })
	slices.Reverse(values) // the namespace is the last label
	return values
}

func (p Panel) unit() string { return p.FieldConfig.Defaults.Unit }

// named is a series under its name in the legend.
type named struct {
	name   string
	values []promql.FPoint
}

// last is the last value of the series.
func (s named) last() float64 { return s.values[len(s.values)-1].F }

// lines draws a plot over time.
func (r *Recording) lines(p Panel, all []named, area draw.Canvas) error {
	slices.SortStableFunc(all, func(a, b named) int { return int(math.Copysign(1, peak(b)-peak(a))) })
	plotted := plot.New()
	plotted.BackgroundColor = color.Transparent
	for _, axis := range []*plot.Axis{&plotted.X, &plotted.Y} {
		axis.Tick.Label.Font.Variant, axis.Tick.Label.Font.Size = sans, 7
		axis.Tick.Label.Color, axis.Tick.Length = mild, 2
		axis.Color, axis.Tick.Color = faint, faint
	}
	plotted.Y.Min = 0
	plotted.X.Min, plotted.X.Max = 0, r.To.Sub(r.From).Seconds()
	plotted.X.Tick.Marker = ticks(func(v float64) string { return fmt.Sprintf("%d:%02d", int(v)/60, int(v)%60) })
	plotted.Y.Tick.Marker = ticks(func(v float64) string { return format(v, p.unit()) })
	plotted.Legend.Top, plotted.Legend.Left = true, true
	plotted.Legend.TextStyle.Font.Variant, plotted.Legend.TextStyle.Font.Size = sans, 7
	plotted.Legend.TextStyle.Color = mild
	plotted.Legend.ThumbnailWidth = 10
	grid := plotter.NewGrid()
	grid.Vertical.Width, grid.Horizontal.Color = 0, faint
	plotted.Add(grid)
	for i, s := range all {
		// A gap in the values is a gap in the line.
		for j, piece := range r.pieces(s) {
			drawn, err := plotter.NewLine(piece)
			if err != nil {
				return err
			}
			drawn.Color, drawn.Width = hues[i%len(hues)], 1
			plotted.Add(drawn)
			if j == 0 && i < names {
				plotted.Legend.Add(s.name, drawn)
			}
		}
	}
	// Room for the legend above the lines.
	plotted.Y.Max = max(plotted.Y.Max, 1e-3) * (1 + .13*float64(min(len(all), names)))
	plotted.Draw(area)
	return nil
}

// pieces are the parts of a series without gaps.
func (r *Recording) pieces(s named) []plotter.XYs {
	var pieces []plotter.XYs
	var before int64
	for _, v := range s.values {
		if math.IsNaN(v.F) || math.IsInf(v.F, 0) {
			continue
		}
		if len(pieces) == 0 || v.T-before > (2*Interval).Milliseconds() {
			pieces = append(pieces, nil)
		}
		before = v.T
		at := plotter.XY{X: time.UnixMilli(v.T).Sub(r.From).Seconds(), Y: v.F}
		pieces[len(pieces)-1] = append(pieces[len(pieces)-1], at)
	}
	return pieces
}

func peak(s named) float64 {
	highest := 0.
	for _, v := range s.values {
		if !math.IsNaN(v.F) && !math.IsInf(v.F, 0) {
			highest = max(highest, v.F)
		}
	}
	return highest
}

// ticks are at most five labelled ticks of an axis.
func ticks(label func(float64) string) plot.Ticker {
	return plot.TickerFunc(func(low, high float64) []plot.Tick {
		major := lo.Filter(plot.DefaultTicks{}.Ticks(low, high), func(t plot.Tick, _ int) bool { return !t.IsMinor() })
		return lo.Map(major, func(t plot.Tick, _ int) plot.Tick { return plot.Tick{Value: t.Value, Label: label(t.Value)} })
	})
}

// format writes a value in one of Grafana's units.
func format(v float64, unit string) string {
	short := func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "-"
	case unit == "bytes":
		return short(math.Round(v/(1<<20))) + " MiB"
	case unit == "s" && math.Abs(v) >= 3600:
		return strconv.FormatFloat(v/3600, 'f', 1, 64) + " h"
	case unit == "s" && math.Abs(v) >= 120:
		return strconv.FormatFloat(v/60, 'f', 1, 64) + " min"
	case unit == "s" && v != 0 && math.Abs(v) < 1:
		return short(v*1000) + " ms"
	case unit == "s":
		return short(v) + " s"
	case unit == "ops" || unit == "reqps":
		return short(v) + "/s"
	case v == math.Trunc(v) && math.Abs(v) < 1e7:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return short(v)
}

func write(c draw.Canvas, words string, size vg.Length, in color.Color, at vg.Point) {
	style := text.Style{Color: in, Font: font.From(plot.DefaultFont, size), Handler: plot.DefaultTextHandler}
	style.Font.Variant = sans
	c.FillText(style, at, words)
}
