package conformance

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
)

// Outcome is what became of a check.
type Outcome string

// Outcomes.
const (
	Passed  Outcome = "passed"
	Failed  Outcome = "failed"
	Skipped Outcome = "skipped"
)

// Result is the check of one behaviour.
type Result struct {
	// ID, Area, Behaviour and Profile are the behaviour's.
	ID        string  `json:"id"`
	Area      string  `json:"area"`
	Behaviour string  `json:"behaviour"`
	Profile   Profile `json:"profile"`
	Outcome   Outcome `json:"outcome"`
	// Message is why it failed or was skipped.
	Message string  `json:"message,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Verdict is what all checks together say.
type Verdict struct {
	Results []Result
	Began   time.Time
	Seconds float64
}

// Count returns how many results have the outcome.
func (v Verdict) Count(o Outcome) int {
	n := 0
	for _, result := range v.Results {
		if result.Outcome == o {
			n++
		}
	}
	return n
}

// Pass reports whether the target conforms: something was checked, and nothing failed.
func (v Verdict) Pass() bool { return v.Count(Failed) == 0 && v.Count(Passed) > 0 }

// Line is the verdict in a line: `conformance: PASS passed=… failed=… skipped=…`.
func (v Verdict) Line() string {
	return fmt.Sprintf("conformance: %s passed=%d failed=%d skipped=%d", v.word(), v.Count(Passed), v.Count(Failed), v.Count(Skipped))
}

func (v Verdict) word() string {
	if v.Pass() {
		return "PASS"
	}
	return "FAIL"
}

// WriteJSON writes the verdict as one JSON object.
func (v Verdict) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(struct {
		Verdict string    `json:"verdict"`
		Passed  int       `json:"passed"`
		Failed  int       `json:"failed"`
		Skipped int       `json:"skipped"`
		Began   time.Time `json:"began"`
		Seconds float64   `json:"seconds"`
		Results []Result  `json:"results"`
	}{v.word(), v.Count(Passed), v.Count(Failed), v.Count(Skipped), v.Began, v.Seconds, v.Results})
}

type junitSuite struct {
	XMLName   xml.Name    `xml:"testsuite"`
	Name      string      `xml:"name,attr"`
	Tests     int         `xml:"tests,attr"`
	Failures  int         `xml:"failures,attr"`
	Skipped   int         `xml:"skipped,attr"`
	Time      string      `xml:"time,attr"`
	Timestamp string      `xml:"timestamp,attr"`
	Cases     []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class   string        `xml:"classname,attr"`
	Name    string        `xml:"name,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitMessage `xml:"failure,omitempty"`
	Skipped *junitMessage `xml:"skipped,omitempty"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the verdict as a JUnit test suite: a test case for each behaviour, its area the class and its id the name.
func (v Verdict) WriteJUnit(w io.Writer) error {
	suite := junitSuite{
		Name: "conformance", Tests: len(v.Results), Failures: v.Count(Failed), Skipped: v.Count(Skipped),
		Time: seconds(v.Seconds), Timestamp: v.Began.UTC().Format("2006-01-02T15:04:05"),
	}
	for _, result := range v.Results {
		c := junitCase{Class: result.Area, Name: result.ID, Time: seconds(result.Seconds)}
		switch result.Outcome {
		case Failed:
			c.Failure = &junitMessage{Message: result.Behaviour, Text: printable(result.Message)}
		case Skipped:
			c.Skipped = &junitMessage{Message: printable(result.Message)}
		default:
		}
		suite.Cases = append(suite.Cases, c)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	encoder := xml.NewEncoder(w)
	encoder.Indent("", "  ")
	if err := encoder.Encode(suite); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

func seconds(s float64) string { return fmt.Sprintf("%.3f", s) }

// printable leaves out what XML cannot hold: messages quote what the target sent.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
}
