package main

import (
	"encoding/xml"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/lipgloss"
	"github.com/charmbracelet/x/ansi"
	"github.com/muesli/termenv"
	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// Sizes in a picture, in pixels.
const (
	columnWidth = 8
	lineHeight  = 18
	margin      = 12
)

// photographer keeps the moment with the most NodeClaims in use.
type photographer struct {
	began time.Time

	stop  chan struct{}
	ended sync.WaitGroup

	best    timeline.State
	elapsed time.Duration
	most    int
}

// photograph watches a recorder until [photographer.save].
func photograph(recorder *timeline.Recorder, began time.Time) *photographer {
	p := &photographer{began: began, stop: make(chan struct{})}
	p.ended.Go(func() {
		ticker := time.NewTicker(redrawEvery)
		defer ticker.Stop()
		for {
			select {
			case <-p.stop:
				return
			case <-ticker.C:
				p.see(recorder.State(), time.Since(p.began))
			}
		}
	})
	return p
}

func (p *photographer) see(state timeline.State, elapsed time.Duration) {
	inUse := lo.CountBy(state.Timelines, func(j timeline.Timeline) bool {
		return j.Reached(timeline.Initialized) && !j.Reached(timeline.Deleting)
	})
	if inUse > p.most {
		p.best, p.elapsed, p.most = state, elapsed, inUse
	}
}

// save ends the watching and writes the table of that moment as an SVG file.
func (p *photographer) save(file string) error {
	close(p.stop)
	p.ended.Wait()
	if p.most == 0 {
		return fmt.Errorf("%s: there is no picture, because no NodeClaim was in use", file)
	}
	lipgloss.SetColorProfile(termenv.ANSI) // also where the output is no terminal
	return os.WriteFile(file, []byte(drawing(viewFleet(p.best, p.elapsed, aroundTable+len(p.best.Timelines)))), 0o600)
}

// attributes of a picture's text, by the parameter of the escape sequence that begins them.
var attributes = map[string]string{
	"1": ` font-weight="bold"`, "2": ` fill="#8b949e"`, "32": ` fill="#3fb950"`, "33": ` fill="#d29922"`,
}

var styled = regexp.MustCompile(`\x1b\[([0-9;]*)m`)

// drawing returns lines of a terminal as an SVG picture. Each run of characters has a set length,
// so that columns are aligned in every font.
func drawing(lines []string) string {
	var b strings.Builder
	width := 2*margin + columnWidth*lo.Max(lo.Map(lines, func(line string, _ int) int { return ansi.StringWidth(line) }))
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="monospace" font-size="13" fill="#e6edf3">`+"\n",
		width, 2*margin+lineHeight*len(lines))
	b.WriteString(`<rect width="100%" height="100%" rx="6" fill="#0d1117"/>` + "\n")
	for i, line := range lines {
		column, style := 0, ""
		write := func(text string) {
			seen := strings.TrimLeft(text, " ")
			column += len(text) - len(seen)
			if seen = strings.TrimRight(seen, " "); seen != "" {
				fmt.Fprintf(&b, `<text x="%d" y="%d" textLength="%d"%s>`,
					margin+columnWidth*column, margin+lineHeight*(i+1)-5, columnWidth*ansi.StringWidth(seen), style)
				_ = xml.EscapeText(&b, []byte(strings.ReplaceAll(seen, " ", "\u00a0")))
				b.WriteString("</text>\n")
			}
			column += ansi.StringWidth(strings.TrimLeft(text, " "))
		}
		for {
			at := styled.FindStringSubmatchIndex(line)
			if at == nil {
				write(line)
				break
			}
			write(line[:at[0]])
			style = attributes[line[at[2]:at[3]]]
			line = line[at[1]:]
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}
