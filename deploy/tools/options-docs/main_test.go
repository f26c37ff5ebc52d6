package main

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	for name, tc := range map[string]struct {
		usage string
		want  []option
	}{
		"pflag": {
			"Usage of x:\n" +
				"      --listen-address host:port   Where to listen. (default \":8443\")\n" +
				"  -q, --quiet                      Say less.\n" +
				"  -h, --help                       Help.\n",
			[]option{
				{name: "listen-address", kind: "host:port", usage: "Where to listen.", standard: ":8443"},
				{name: "quiet", usage: "Say less."},
			},
		},
		"flag": {
			"Usage of x:\n" +
				"  -timeout duration\n    \tHow long. (default 10s)\n" +
				"  -quiet\n    \tSay\n    \tless.\n",
			[]option{
				{name: "quiet", usage: "Say less."},
				{name: "timeout", kind: "duration", usage: "How long.", standard: "10s"},
			},
		},
		"neither": {"panic: no\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := parse(tc.usage); !slices.Equal(got, tc.want) {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}
