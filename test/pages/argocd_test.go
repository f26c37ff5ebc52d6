package pages_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	lua "github.com/yuin/gopher-lua"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// The scripts are run by the interpreter of Lua that Argo CD uses.
func TestHealthForArgoCD(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "deploy/examples/argocd-health.yaml"))
	require.NoError(t, err)
	var config corev1.ConfigMap
	require.NoError(t, yaml.UnmarshalStrict(text, &config))
	require.Equal(t, "argocd-cm", config.Name)
	require.Len(t, config.Data, 2)

	ready := func(status metav1.ConditionStatus, generation int64) []metav1.Condition {
		return []metav1.Condition{
			{Type: "Other", Status: metav1.ConditionFalse, Message: "not this one", ObservedGeneration: 2},
			{Type: "Ready", Status: status, Message: "told", ObservedGeneration: generation},
		}
	}
	for kind, crd := range map[string]string{
		"agent.karpenter.cluster.x-k8s.io_NodePoolSet":   "agent/files/crds/agent.karpenter.cluster.x-k8s.io_nodepoolsets.yaml",
		"karpenter.cluster.x-k8s.io_ClusterAPINodeClass": "shim/files/crds/karpenter.cluster.x-k8s.io_clusterapinodeclasses.yaml",
	} {
		require.FileExists(t, filepath.Join(root(t), "deploy/charts", crd))
		script := config.Data["resource.customizations.health."+kind]
		require.NotEmpty(t, script, kind)
		for name, test := range map[string]struct {
			conditions      []metav1.Condition
			status, message string
		}{
			"new":                   {nil, "Progressing", "Waiting for the condition Ready"},
			"ready":                 {ready(metav1.ConditionTrue, 2), "Healthy", "told"},
			"not ready":             {ready(metav1.ConditionFalse, 2), "Degraded", "told"},
			"not known yet":         {ready(metav1.ConditionUnknown, 2), "Progressing", "told"},
			"of an earlier content": {ready(metav1.ConditionTrue, 1), "Progressing", "Waiting for the condition Ready"},
		} {
			t.Run(kind+"/"+name, func(t *testing.T) {
				object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&agentv1.NodePoolSet{
					ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: agentv1.NodePoolSetStatus{Conditions: test.conditions},
				})
				require.NoError(t, err)
				state := lua.NewState()
				defer state.Close()
				state.SetGlobal("obj", luaValue(state, object))
				require.NoError(t, state.DoString(script))
				health, is := state.Get(-1).(*lua.LTable)
				require.True(t, is)
				require.Equal(t, test.status, health.RawGetString("status").String())
				require.Equal(t, test.message, health.RawGetString("message").String())
			})
		}
	}
}

func luaValue(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, of := range value {
			table.RawSetString(key, luaValue(state, of))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, of := range value {
			table.Append(luaValue(state, of))
		}
		return table
	case string:
		return lua.LString(value)
	case int64:
		return lua.LNumber(value)
	case bool:
		return lua.LBool(value)
	}
	return lua.LNil
}
