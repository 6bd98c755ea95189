package main

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/assert/yaml"
	"github.com/stretchr/testify/require"
)

// manifest is what the test reads of both objects.
type manifest struct {
	Kind string
	Spec struct {
		Replicas int
		Selector selector
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				Grace  int `yaml:"terminationGracePeriodSeconds"`
				Spread []struct {
					LabelSelector selector `yaml:"labelSelector"`
				} `yaml:"topologySpreadConstraints"`
				Containers []container
			}
		}
	}
}

type selector struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

type container struct {
	Args []string
	Env  []struct {
		Name      string
		ValueFrom struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	Ports []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
	}
	Live      probe `yaml:"livenessProbe"`
	Ready     probe `yaml:"readinessProbe"`
	Lifecycle struct {
		PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
	}
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
	Period  int                         `yaml:"periodSeconds"`
	Timeout int                         `yaml:"timeoutSeconds"`
}

func readManifest(t *testing.T) (deployment, budget manifest) {
	t.Helper()
	text, err := os.ReadFile("deployment.yaml")
	require.NoError(t, err)
	objects := strings.Split(string(text), "\n---\n")
	require.Len(t, objects, 2)
	require.NoError(t, yaml.Unmarshal([]byte(objects[0]), &deployment))
	require.NoError(t, yaml.Unmarshal([]byte(objects[1]), &budget))
	return deployment, budget
}

// The manifest says what the program does.
func TestDeployment(t *testing.T) {
	t.Parallel()
	deployment, budget := readManifest(t)
	require.Equal(t, []string{"Deployment", "PodDisruptionBudget"}, []string{deployment.Kind, budget.Kind})
	pod := deployment.Spec.Template.Spec
	require.Len(t, pod.Containers, 1)
	c := pod.Containers[0]

	o, err := parse(c.Args, func(name string) string { return map[string]string{podNameEnv: "worker-0"}[name] })
	require.NoError(t, err, "the program has these flags")
	preStop := time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second
	require.NotZero(t, preStop)
	assert.Equal(t, time.Duration(pod.Grace)*time.Second, preStop+o.stopTimeout+overtime+margin, "terminationGracePeriodSeconds")
	defaults, err := parse(nil, func(string) string { return "" })
	require.NoError(t, err)
	assert.Equal(t, defaults.stopTimeout, o.stopTimeout, "-stop-timeout here and in the program")

	_, port, err := net.SplitHostPort(o.listen)
	require.NoError(t, err)
	require.Len(t, c.Ports, 1)
	assert.Equal(t, port, strconv.Itoa(c.Ports[0].ContainerPort), "containerPort and -listen")
	for path, p := range map[string]probe{livePath: c.Live, readyPath: c.Ready} {
		assert.Equal(t, path, p.HTTPGet.Path)
		assert.Equal(t, c.Ports[0].Name, p.HTTPGet.Port)
		assert.LessOrEqual(t, p.Timeout, p.Period)
	}

	require.NotEmpty(t, c.Env)
	assert.Equal(t, podNameEnv, c.Env[0].Name)
	assert.Equal(t, "metadata.name", c.Env[0].ValueFrom.FieldRef.FieldPath)
	assert.Equal(t, "worker-0", o.name)

	assert.GreaterOrEqual(t, deployment.Spec.Replicas, 2, "somebody has to be left")
	require.Len(t, pod.Spread, 1)
	for _, s := range []selector{deployment.Spec.Selector, budget.Spec.Selector, pod.Spread[0].LabelSelector} {
		assert.Equal(t, deployment.Spec.Template.Metadata.Labels, s.MatchLabels)
	}
}

// README.md does the sum with the same numbers.
func TestREADME_sum(t *testing.T) {
	t.Parallel()
	deployment, _ := readManifest(t)
	o, err := parse(nil, os.Getenv)
	require.NoError(t, err)
	pod := deployment.Spec.Template.Spec
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	sum := strings.Join([]string{strconv.Itoa(pod.Containers[0].Lifecycle.PreStop.Sleep.Seconds), seconds(o.stopTimeout), seconds(overtime), seconds(margin)}, " + ")
	assert.Contains(t, string(readme), sum+" = "+strconv.Itoa(pod.Grace))
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d.Seconds())) }
