package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// The page about prices shows a command and what it prints.
func TestThePageShowsWhatPricesPrints(t *testing.T) {
	_ = os.Getenv("TESTED_DOCS") // declares a file outside of the module as an input of the test cache
	page, err := os.ReadFile("../../../docs/prices.md")
	require.NoError(t, err)
	shown := regexp.MustCompile("(?s)```console\n\\$ capi-agent prices (.*?)\n(apiVersion.*?)```").FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, shown)
	for _, example := range shown {
		var out strings.Builder
		command := newPrices()
		command.SetOut(&out)
		command.SetArgs(strings.Fields(strings.ReplaceAll(example[1], "\\\n", " ")))
		require.NoError(t, command.Execute())
		require.Equal(t, example[2], out.String())
		var list corev1.ConfigMap
		require.NoError(t, yaml.UnmarshalStrict([]byte(out.String()), &list))
		_, err := pricing.ParseList("the list", []byte(list.Data["prices.yaml"]))
		require.NoError(t, err)
	}
}

func TestPricesNamesEveryMistake(t *testing.T) {
	for name, c := range map[string]struct {
		arguments string
		want      []string
	}{
		"no machine":                {"--per-cpu=1", []string{"there are no machines"}},
		"no memory":                 {"a=cpu=1", []string{"cpu and memory are required"}},
		"a quantity":                {"a=cpu=x,memory=1Gi", []string{`"a=cpu=x,memory=1Gi": cpu: `}},
		"a resource":                {"a=cpu=1,memory=1Gi,gpu=1", []string{`"gpu" is not a resource`}},
		"no rates":                  {"a=cpu=1,memory=1Gi", []string{"its price would be 0"}},
		"no rate of an accelerator": {"--per-cpu=1 a=cpu=1,memory=1Gi,nvidia.com/gpu=1", []string{"there is no rate for nvidia.com/gpu"}},
		"a price":                   {"a=900/week b=-1/month", []string{`"900/week" is not a price`, `"-1/month" is not a price`}},
		"a resource that is first":  {"a=nvidia.com/gpu=1,gpu=1", []string{`"gpu" is not a resource`}},
		"a rate":                    {"--per-cpu=-1 a=cpu=1,memory=1Gi", []string{"-1 is not a rate"}},
		"the currency":              {"--currency=euro a=1/hour", []string{"is not an ISO 4217 code"}},
		"the instance type":         {"a/b=1/hour", []string{"prices[0].instanceType:"}},
		"what it is for":            {"--cluster=production --infrastructure=metal3 a=1/hour", []string{"prices[0].cluster:", "prices[0].infrastructure:"}},
		"an instance type, twice":   {"a=1/hour a=2/hour", []string{"is for the same machines as prices[0]"}},
	} {
		t.Run(name, func(t *testing.T) {
			command := newPrices()
			command.SilenceErrors, command.SilenceUsage = true, true
			command.SetArgs(strings.Fields(c.arguments))
			err := command.Execute()
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}
