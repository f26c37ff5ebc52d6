package options_test

import (
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/sets"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/metrics/node"
)

// register registers core's metrics about Nodes, which panics if it is done twice.
var register = sync.OnceFunc(func() { node.NewController(nil) })

var variableLabels = regexp.MustCompile(`fqName: "karpenter_nodes_.*variableLabels: \{(.*)\}\}`)

// dimensionsOfCore returns the labels that core's metrics about Nodes have in addition to the
// well-known labels.
func dimensionsOfCore(t *testing.T) []string {
	t.Helper()
	register()
	described, is := crmetrics.Registry.(prometheus.Collector)
	require.True(t, is)
	all := make(chan *prometheus.Desc)
	go func() { defer close(all); described.Describe(all) }()
	dimensions := sets.New[string]()
	for each := range all {
		if found := variableLabels.FindStringSubmatch(each.String()); found != nil {
			dimensions.Insert(strings.Split(found[1], ",")...)
		}
	}
	for key := range karpv1.WellKnownLabels {
		if _, name, ok := strings.Cut(key, "/"); ok {
			dimensions.Delete(strings.ReplaceAll(strings.ToLower(name), "-", "_"))
		}
	}
	return sets.List(dimensions)
}

// A label that becomes one of these makes core panic when it starts.
func TestNoNodeLabelMayBeADimensionOfCoresMetrics(t *testing.T) {
	dimensions := dimensionsOfCore(t)
	require.NotEmpty(t, dimensions)
	for _, dimension := range dimensions {
		_, err := parse(t, append(minimal[:4:4], "--node-label-keys=example.com/"+strings.ReplaceAll(dimension, "_", "-"))...)
		assert.ErrorContains(t, err, "would be the label "+dimension, "a label of core's metrics that this release of core may have added")
	}
}
